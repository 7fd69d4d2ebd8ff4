"""Rules about gradients that are changed: clipped, divided or edited, too early or otherwise than the full batch's."""

from __future__ import annotations

from tl_accum._context import Context
from tl_accum._updates import Change, updates
from tl_accum._vectors import added, agrees, norm, ratio
from tl_accum._words import number, places, times
from tl_core import Finding
from tl_telemetry import Clip


def clipped(context: Context) -> Finding | None:
    """See clips that run within a group."""
    found = [change for change in context.changes if change.what == "clip"]
    if not found or context.is_kept:
        return None
    first = found[0]
    where = places((change.place for change in found), context.num_parts)
    group = context.comparison.run.groups[context.number]
    ran = [step for step in group.steps if step.has(Clip)]
    return Finding(
        "clip-per-micro-batch",
        f"the clip at {first.site} changed the gradients in {where}, before all of them were added up: norm "
        f"{number(norm(first.before))} to {number(norm(first.after))} in the first; they added up to {context.norms()}",
        "the clip runs in every micro-batch and bounds parts of the sum, the first ones again and again"
        if len(ran) == context.num_parts
        else "the clip runs before the last micro-batch, and bounds a part of the sum",
        "clip once, between the last backward() of a group and optimizer.step()",
        evidence={"bound": first.bound, "clipped": len(found)},
    )


def edited(context: Context) -> Finding | None:
    """See gradients that are changed within a group by something else than a clip."""
    found = [change for change in context.changes if change.what == "edit"]
    if not found or context.is_kept:
        return None
    first = found[0]
    factor = ratio(first.after, first.before, context.rtol)
    how = (
        f"multiplied by {times(factor).removesuffix('x')}"
        if factor
        else f"changed (norm {number(norm(first.before))} to {number(norm(first.after))})"
    )
    where = places((change.place for change in found), context.num_parts)
    if len(found) < 2:
        again = "what is done to them hits only the micro-batches up to there"
    elif factor is None and _adds(context, found):
        again = "a term is added to them in every micro-batch, where an update should have it once"
    else:
        again = "what is done to them hits the gradients of the earlier micro-batches again in each later one"
    return Finding(
        "gradient-edited",
        f"the gradients were {how} after {where}, before all of them were added up: the update used "
        f"gradients of {context.norms()}",
        again,
        "change gradients (divide, unscale, clip, add noise) once, between the last backward() of a group and "
        "optimizer.step(); or divide the loss instead",
        evidence={"factor": factor, "edited": len(found)},
    )


def _adds(context: Context, found: list[Change]) -> bool:
    """Tell whether the same is added to the gradients each time."""
    first, *others = (added([change.after, change.before], [1.0, -1.0]) for change in found)
    return all(agrees(other, first, 10 * context.rtol) for other in others)


def edited_at_end(context: Context) -> Finding | None:
    """See gradients that are right when the last backward pass ends, and are changed before the step."""
    expected, got = context.gap.expected, context.gap.got
    if not context.same(context.total, got.raw) or not context.same(got.raw, expected.raw):
        return None
    before, after = (ratio(update.accumulated, update.raw, context.rtol) for update in (expected, got))
    if before is None or after is None or abs(after / before - 1.0) <= context.rtol:
        return None
    parts = context.num_parts
    twice = abs(after / before * parts - 1.0) <= context.rtol
    return Finding(
        "loss-divided-twice" if twice else "gradient-edited",
        f"the micro-batches' gradients add up to the full batch's (norm {number(norm(got.raw))}), and are multiplied "
        f"by {times(after).removesuffix('x')} before the step (with the full batch by "
        f"{times(before).removesuffix('x')})",
        f"the loss is divided by the {parts} accumulation steps, and the gradients are divided by them again"
        if twice
        else "what scales the gradients before the step depends on the accumulation steps, as their sum does not",
        "divide either the loss or the gradients, once"
        if twice
        else "scale the gradients as for the full batch: by the same factor, whatever the accumulation steps",
        evidence={"factor": after, "expected_factor": before},
    )


def edited_after_clip(context: Context) -> Finding | None:
    """See gradients of a wrong scale that are clipped first and scaled afterwards."""
    got = context.gap.got
    if got.clipped is None:
        return None
    factor, after = ratio(context.got, context.expected, context.rtol), ratio(got.applied, got.clipped, context.rtol)
    if factor is None or after is None or abs(factor * after - 1.0) > context.rtol or abs(after - 1.0) <= context.rtol:
        return None
    clip = got.clips[-1]
    by_parts = abs(factor / context.num_parts - 1.0) <= context.rtol
    division = (
        f"the gradients are divided by the {context.num_parts} accumulation steps"
        if by_parts
        else "the gradients get the full batch's scale"
    )
    return Finding(
        "gradient-edited",
        f"the clip at {clip.site} finds gradients {times(factor)} the full batch's (norm {number(norm(context.got))} "
        f"instead of {number(norm(context.expected))}), which are multiplied by {times(after).removesuffix('x')} "
        "after it",
        f"{division} after the clip instead of before it, so that its bound of {clip.bound:g} is "
        + (f"{times(factor)} too tight" if factor > 1.0 else f"{times(1.0 / factor)} too wide"),
        "divide the loss, or the gradients before the clip",
        evidence={"factor": factor},
    )


def edit_missing(context: Context) -> Finding | None:
    """See gradients that an earlier group scaled before its step, and that this one does not."""
    factor = ratio(context.got, context.expected, context.rtol)
    if factor is None or not context.number or not context.is_kept:
        return None
    run = context.comparison.run
    before = updates(run, run.groups[context.number - 1]).get(context.gap.optimizer, [])
    earlier = ratio(before[0].accumulated, before[0].raw, context.rtol) if before else None
    if earlier is None or abs(earlier * factor - 1.0) > context.rtol or abs(earlier - 1.0) <= context.rtol:
        return None
    return Finding(
        "gradient-edited",
        f"the gradients were multiplied by {times(earlier).removesuffix('x')} before the step in the cycle before, and "
        f"are not in this one: they are {times(factor)} the full batch's",
        "what scales the gradients reaches other tensors from then on: ones that were collected once, before "
        "zero_grad() dropped them (set_to_none), or under a condition that is no longer true",
        "take p.grad anew each time, or divide the loss",
        evidence={"ratio": factor, "factor_before": earlier},
    )
