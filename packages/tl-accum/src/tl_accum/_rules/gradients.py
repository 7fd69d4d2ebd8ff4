"""Rules about the gradients of an update: what they are made of, and what they should be made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tl_accum._compare import Comparison
from tl_accum._context import Context
from tl_accum._rules.edited import clipped, edit_missing, edited, edited_after_clip, edited_at_end
from tl_accum._rules.kept import left_over, other_passes, scale_changed, without_backward, zeroed
from tl_accum._rules.probes import moving_figures, moving_state, partly_scaled
from tl_accum._rules.scale import mostly_scaled, pass_scaled, roughly_scaled, scaled
from tl_accum._rules.terms import constant_term, coupled, mean_of_means, unequal
from tl_accum._runs import MicroStep
from tl_accum._vectors import norm, ratio
from tl_accum._words import cycle, listed, number, often, optimizers, places
from tl_core import Finding, parameter_names
from tl_telemetry import Backward, OptimizerStep

Cause = Callable[[Context], "Finding | None"]

# What happened to the gradients before what they should have been: the first that fits is the cause.
CAUSES: tuple[Cause, ...] = (
    scale_changed,
    left_over,
    other_passes,
    zeroed,
    clipped,
    edited,
    edited_after_clip,
    edited_at_end,
    edit_missing,
    without_backward,
    scaled,
    pass_scaled,
    moving_state,
    mean_of_means,
    constant_term,
    unequal,
    partly_scaled,
    mostly_scaled,
    coupled,
)

# Those that hold although the step draws random numbers: what happens within the one run.
COARSE: tuple[Cause, ...] = (scale_changed, left_over, other_passes, zeroed, clipped, edited, roughly_scaled)


def gradient_findings(comparison: Comparison) -> Iterator[Finding]:
    """See updates whose gradients differ, and name what makes them differ."""
    gap = next((gap for gap in comparison.gaps if not gap.in_step), None)
    if gap is None or gap.timing:  # the gradients that follow are those of other micro-batches, or other weights
        return
    told: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    seen: set[str] = set()
    for one in gap.gradients:
        if one.optimizer in seen:
            continue
        seen.add(one.optimizer)
        finding = _cause(Context(comparison, gap.number, one))
        if finding is None:
            continue
        told.setdefault((finding.rule, finding.cause, finding.fix), []).append((one.optimizer, finding))
    for alike in told.values():
        names = tuple(name for _, finding in alike for name in finding.parameters)
        first = alike[0][1]
        whose = ""
        if len(comparison.run.setup.optimizers) > 1:
            figures = f"; the figures are those of {alike[0][0]!r}" if len(alike) > 1 else ""
            whose = f" ({optimizers(name for name, _ in alike)}{figures})"
        yield replace(first, seen=f"{_where(comparison, gap.number)}{whose}: {first.seen}", parameters=names)


def _where(comparison: Comparison, group: int) -> str:
    return cycle(comparison.plan, comparison.plan.groups[group])


def _cause(context: Context) -> Finding | None:
    if context.comparison.is_random:
        found = (cause(context) for cause in COARSE)
        return next((_with_clip(context, finding) for finding in found if finding is not None), None)
    if not context.gap.before_clipping:
        return _as_applied(context)
    for cause in CAUSES:
        if (finding := cause(context)) is not None:
            return _with_clip(context, finding)
    return _with_clip(context, _unknown(context))


def _with_clip(context: Context, finding: Finding) -> Finding:
    """Say it where clipping hides a difference from the weights."""
    names = tuple(gap.name for gap in context.gap.parameters)
    if context.hidden_by_clip and context.gap.expected.clips:
        site = context.gap.expected.clips[0].site
        finding = replace(
            finding, seen=f"{finding.seen}; the clip at {site} hides it from the weights: after it, the gradients agree"
        )
    return replace(finding, parameters=names)


def _as_applied(context: Context) -> Finding:
    """See gradients that agree before clipping and differ as applied."""
    expected, got = context.gap.expected, context.gap.got
    a, b = norm(expected.applied), norm(got.applied)
    names = tuple(gap.name for gap in context.gap.parameters)
    figures = (
        f"the gradients agree before clipping (norm {number(norm(expected.accumulated))}) and differ as applied: "
        f"{number(b)} accumulated, {number(a)} with the full batch"
    )
    bounds = [sorted({clip.bound for clip in update.clips}) for update in (expected, got)]
    if len(expected.clips) != len(got.clips):
        cause = (
            f"before the step, they are clipped {often(len(got.clips))} with accumulation, and "
            f"{often(len(expected.clips))} with the full batch"
        )
        fix = "clip once, between the last backward() of a group and optimizer.step()"
    elif bounds[0] != bounds[1]:
        cause = f"the bound of the clip is {bounds[1][0]:g} with accumulation and {bounds[0][0]:g} with the full batch"
        fix = "clip the accumulated gradients by the bound that is meant for the full batch's"
    else:
        cause = "something changes the gradients before the step otherwise than the full batch's" + _after_clip(context)
        fix = "look at what runs between the last backward() of a group and optimizer.step()"
    return Finding("clip-differs", figures, cause, fix, parameters=names, evidence={"expected": a, "got": b})


def _after_clip(context: Context) -> str:
    """Say by what the gradients are multiplied after the clip, where they agree until then."""
    expected, got = context.gap.expected, context.gap.got
    if expected.clipped is None or got.clipped is None or not context.same(got.clipped, expected.clipped):
        return ""
    factors = [ratio(update.applied, update.clipped or {}, context.rtol) for update in (expected, got)]
    if factors[0] is None or factors[1] is None:
        return ", after the clip"
    return (
        f": after the clip, they are multiplied by {number(factors[1])}, and the full batch's by {number(factors[0])}"
    )


def _unknown(context: Context) -> Finding:
    gaps = context.gap.parameters
    worst = max(gaps, key=lambda gap: abs(gap.got - gap.expected) if gap.got == gap.got else 0.0)
    a, b = norm(context.expected), norm(context.got)
    if context.is_untraced:
        kept = "no backward pass outside of step() filled them"
    elif context.is_kept:
        kept = "they are all that the micro-batches' backward passes added"
    else:
        kept = f"the micro-batches' backward passes added a norm of {number(norm(context.total))}"
    return Finding(
        "gradients-differ",
        f"the accumulated gradients differ in {context.shown(gap.name for gap in gaps)}: norm {number(b)} instead of "
        f"{number(a)}; {worst.name} {number(worst.got)} instead of {number(worst.expected)}; {kept}",
        *_candidates(context),
        evidence={"expected_norm": a, "norm": b},
    )


def _candidates(context: Context) -> tuple[str, str]:
    """Return what the evidence leaves open, and what to change."""
    if told := _steps_between(context):
        return told
    if hooks := _hooks(context):
        return (
            f"undecided: {hooks}; or a part of the loss that is not divided, or a step that does something else for "
            "other accumulation steps",
            "do what the hooks do once, to the accumulated gradients, before optimizer.step()",
        )
    others: list[str] = []
    if moved := moving_figures(context)[:3]:
        others.append(f"what changed in every micro-batch ({listed(moved)}), where the loss is computed with it")
    if context.comparison.drew:
        others.append("random numbers that the step draws for a whole batch, from a generator that it seeds itself")
    beside = "".join(f"{other}; " for other in others)
    return (
        f"undecided: {beside}a part of the loss that is not divided, a step that does something else for other "
        "accumulation steps, or a loss that is neither a mean nor a sum over examples",
        "compare what the step does for make_step(1) and for more: each micro-batch's loss must be its share of the "
        "full batch's",
    )


def _steps_between(context: Context) -> tuple[str, str] | None:
    """See another optimizer's step before the last backward pass of an update: earlier ones saw other weights."""
    last = context.passes[-1] if context.passes else None
    earlier = {one.place for one in context.passes if last is not None and one.place < last.place}
    if last is None or not earlier or not context.reference_passes:
        return None
    made, full = (run.groups[context.number] for run in (context.comparison.run, context.comparison.reference))
    ours = _stepped_before(context, made.steps[last.place], last.ordinal)
    wanted = _stepped_before(context, full.steps[0], context.reference_passes[-1].ordinal)
    stepped = [name for name in ours if name in wanted]
    if not stepped:
        return None
    return (
        f"undecided: {optimizers(stepped)} {'steps' if len(stepped) == 1 else 'step'} in "
        f"{places([last.place], context.num_parts)} before backward() at {last.site}: the passes of "
        f"{places(earlier, context.num_parts)} ran with the weights before that step, the full batch's with those "
        "after it; a part of the loss that is not divided would show like this too",
        "run all backward passes of a group before the first optimizer steps, or accumulate one optimizer's whole "
        "group before the other's begins",
    )


def _stepped_before(context: Context, step: MicroStep, ordinal: int) -> list[str]:
    """Return which other optimizers made an update in a step before one of its backward passes."""
    found: dict[str, None] = {}
    passed = 0
    for event in step.record.events:
        if isinstance(event, OptimizerStep) and event.optimizer != context.gap.optimizer and event.graded:
            found[event.optimizer] = None
        elif isinstance(event, Backward):
            if passed == ordinal:
                break
            passed += 1
    return list(found)


def _hooks(context: Context) -> str:
    held = parameter_names(context.comparison.run.setup.model)
    hooked = [name for name in context.names if name in held and held[name]._backward_hooks]
    if not hooked:
        return ""
    return (
        f"{context.shown(hooked)} {'has a gradient hook' if len(hooked) == 1 else 'have gradient hooks'} "
        f"(register_hook), which change{'s' if len(hooked) == 1 else ''} each micro-batch's gradient by itself"
    )
