"""Rules about gradient clipping."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import BY_HAND, Backward, Clip, OptimizerStep
from tl_telemetry._evidence import Evidence, at, fresh_passes, number, several, telling
from tl_telemetry._record import StepRecord, total

# From this share of clipped updates on, a clip is the rule rather than the exception.
NEARLY_EVERY = 0.9
# No gradient is clipped to this: a call with a bound from here on is made for the norm that it returns.
MEASURES = 1e8

TIGHT = (
    "undecided: the bound is meant to be tight (every update then has the same length), or the gradients are larger "
    "than they should be (targets or losses on an unusual scale, an exploding layer)"
)


def clip_after_step(run: Evidence) -> Iterator[Finding]:
    """See gradients that are clipped when an update has used them already."""
    clipped_in_time = {i for _, clip in run.clips if _finite(clip) for i in set(clip.graded) - set(clip.used)}
    for (function, site), calls in run.clips_by_site.items():
        late = [(r, c) for r, c in calls if _finite(c) and c.graded and set(c.used) == set(c.graded)]
        used = {i for _, clip in late for i in clip.used}
        if not late or len(late) * 3 < len(calls) * 2 or not used.isdisjoint(clipped_in_time):
            continue
        hit = telling(record.step for record, _ in late)
        record, clip = max(late, key=lambda pair: total(pair[1].norms.values()))
        # what an update left behind is still there when a clip comes before the next backward pass
        first = all(_before_backward(record, clip) for record, clip in late)
        yield Finding(
            rule="clip-after-step",
            seen=f"{function}() at {site} clipped gradients that an update had used already ({len(late)} of "
            f"{several(len(calls), 'call')}, {at(hit)}): a norm of {number(total(clip.norms.values()))} had been "
            f"applied unclipped (seen in step {record.step}), with a bound of {clip.bound:g}",
            cause="the clip comes before backward(), on the gradients that the last update left"
            if first
            else "the clip comes after optimizer.step()",
            fix="clip between backward() and optimizer.step() (with a GradScaler: after scaler.unscale_(optimizer))",
            steps=hit,
            parameters=run.named(used),
            evidence={"calls": len(calls), "after_step": len(late)},
        )


def clip_misses(run: Evidence) -> Iterator[Finding]:
    """See clips that touch none of the gradients that are stepped."""
    stepped = {i for _, event in run.steps for i in event.graded}
    if not stepped:
        return  # no update had a gradient: other rules say why, and there was nothing to clip
    for (function, site), calls in run.clips_by_site.items():
        finite = [(record, clip) for record, clip in calls if _finite(clip)]
        if not finite:
            continue
        if any(not set(clip.graded).isdisjoint(stepped) for _, clip in finite):
            yield from _clips_zeros(run, function, site, finite)
            yield from _clips_what_is_dropped(run, function, site, finite)
            continue
        followed = {i for _, clip in finite for i in clip.followed}
        given = max(clip.given for _, clip in finite)
        graded = {i for _, clip in finite for i in clip.graded}
        if any(clip.with_gradient > len(clip.graded) for _, clip in finite):
            continue  # gradients of tensors that nobody steps are used in another way: a perturbation's, an input's
        if not given:
            what = "it was given no tensors at all"
            cause = "its argument is empty: usually a generator that was read before (`params = model.parameters()`)"
            fix = "pass a list, or call model.parameters() again"
        elif not followed.isdisjoint(stepped):
            what = f"none of its {several(given, 'tensor')} had a gradient at that time"
            first = all(_before_backward(record, clip) for record, clip in finite)
            cause = "it runs before backward()" if first else "it runs after zero_grad()"
            cause += ": there is nothing to clip at that time"
            fix = "clip between backward() and optimizer.step()"
        else:
            whose = run.shown(followed) if followed else "tensors that are neither the model's nor an optimizer's"
            state = "which no optimizer stepped" if graded else "which had no gradient"
            what = f"it covers only {whose}, {state}; what was stepped is {run.shown(stepped)}"
            cause = "the clip is given other parameters than those that are trained"
            fix = "pass the trained parameters, for example model.parameters()"
        hit = telling(record.step for record, _ in finite)
        yield Finding(
            rule="clip-misses",
            seen=f"{function}() at {site} clipped none of the stepped gradients: "
            f"{what} ({several(len(finite), 'call')}, {at(hit)})",
            cause=cause,
            fix=fix,
            steps=hit,
            parameters=run.named(followed),
            evidence={"calls": len(finite), "given": given, "with_gradient": len(graded)},
        )


def _clips_what_is_dropped(
    run: Evidence, function: str, site: str, calls: list[tuple[StepRecord, Clip]]
) -> Iterator[Finding]:
    """See clips whose gradients never go into an update, right before an update of other parameters."""
    applied: dict[int, list[tuple[int, ...]]] = {}  # backward pass -> the parameters that were stepped with it
    for _, event in run.steps:
        for portion in event.portions:
            for one in portion.source:
                applied.setdefault(one, []).append(portion.parameters)
    by_hand = {i for parameters in applied.get(BY_HAND, ()) for i in parameters}
    pending = run.facts.recorder.gradients.held_passes()
    hit: list[int] = []
    covered: set[int] = set()
    stepped: set[int] = set()
    optimizers: list[str] = []
    for record, clip in calls:
        passes = fresh_passes(clip)
        graded = set(clip.graded)
        if not by_hand.isdisjoint(graded):
            return  # gradients that were edited or assigned after the clip: what became of these is not known
        if any(not graded.isdisjoint(parameters) for one in passes for parameters in applied.get(one, ())):
            return
        following = _next_step(record, clip)
        if not passes or not passes.isdisjoint(pending) or following is None or not graded.isdisjoint(following.graded):
            continue
        hit.append(record.step)
        covered |= graded
        stepped.update(following.graded)
        optimizers.append(following.optimizer)
    if len(hit) < 2 or len(hit) * 3 < len(calls) * 2:
        return
    names = " and ".join(map(repr, dict.fromkeys(optimizers)))
    yield Finding(
        rule="clip-misses",
        seen=f"{function}() at {site} clipped none of the stepped gradients: it covers only {run.shown(covered)}, "
        f"whose gradients of that time never went into an update; what was stepped next is {run.shown(stepped)} "
        f"({several(len(hit), 'call')}, {at(hit)})",
        cause=f"the clip is given other parameters than those that {names} steps after it",
        fix=f"pass the parameters of {names}",
        steps=telling(hit),
        parameters=run.named(covered),
        evidence={"calls": len(calls), "dropped": len(hit)},
    )


def _next_step(record: StepRecord, clip: Clip) -> OptimizerStep | None:
    """Return the optimizer step that follows a clip in its record without a backward pass in between."""
    position = next(n for n, event in enumerate(record.events) if event is clip)
    for event in record.events[position:]:
        if isinstance(event, OptimizerStep):
            return event
        if isinstance(event, Backward):
            return None
    return None


def _clips_zeros(run: Evidence, function: str, site: str, calls: list[tuple[StepRecord, Clip]]) -> Iterator[Finding]:
    """See clips that find zeros in all gradients, although the updates then apply others."""
    if any(total(clip.norms.values()) > 0.0 for _, clip in calls):
        return
    covered = {i for _, clip in calls for i in clip.graded}
    applied = max(run.norm_at(event, covered) for _, event in run.steps)
    if not applied > 0.0:
        return
    hit = telling(record.step for record, _ in calls)
    yield Finding(
        rule="clip-misses",
        seen=f"{function}() at {site} clipped none of the stepped gradients: they were 0 (or None) "
        f"at that time ({several(len(calls), 'call')}, {at(hit)}), and updates then applied a norm of up to "
        f"{number(applied)}",
        cause="it runs after zero_grad() and before backward(): there is nothing to clip at that time",
        fix="clip between backward() and optimizer.step()",
        steps=hit,
        parameters=run.named(covered),
        evidence={"calls": len(calls), "largest_norm_applied": applied},
    )


def _before_backward(record: StepRecord, clip: Clip) -> bool:
    """Tell whether a backward pass follows the clip in its step, and none precedes it."""
    position = next(n for n, event in enumerate(record.events) if event is clip)
    earlier = any(isinstance(event, Backward) for event in record.events[:position])
    return not earlier and any(isinstance(event, Backward) for event in record.events[position:])


def clip_every_update(run: Evidence) -> Iterator[Finding]:
    """Note clips that nearly every update runs into."""
    for (function, site), calls in run.clips_by_site.items():
        if function == "clip_grad_value_":
            continue
        before = [
            (record.step, clip, _norm(clip))
            for record, clip in calls
            if _finite(clip) and clip.graded and not clip.used and _by_l2_norm(run, record, clip)
        ]
        over = [(step, norm) for step, clip, norm in before if norm > _bound(clip)]
        if len(before) < 5 or len(over) < NEARLY_EVERY * len(before):
            continue
        norms = sorted(norm for _, norm in over)
        first = before[0][1]
        scaled = (
            ""
            if first.scale is None
            else f" (a bound of {first.bound:g} on gradients still multiplied by the loss scale)"
        )
        yield Finding(
            rule="clip-every-update",
            seen=f"{function}() at {site} scaled the gradients down to {_bound(first):.6g}{scaled} in {len(over)} of "
            f"{several(len(before), 'call')} ({at(step for step, _ in over)}): the norm before was {number(norms[0])} "
            f"to {number(norms[-1])}, {number(norms[len(norms) // 2])} in the median",
            cause=TIGHT
            if first.scale is None
            else "the clip runs before scaler.unscale_(optimizer), on gradients that the loss scale makes larger",
            fix="nothing, if a tight bound is meant; else normalise the targets, or raise the bound; max_grad_norm= "
            "makes a norm before clipping that is too large a finding"
            if first.scale is None
            else "call scaler.unscale_(optimizer) before it, once an update; tl-amp's check looks at all that is done "
            "with a GradScaler",
            steps=telling(step for step, _ in over),
            evidence={"updates": len(before), "clipped": len(over), "median_norm": norms[len(norms) // 2]},
        )


def _finite(clip: Clip) -> bool:
    """Tell whether the clip has a bound; with an infinite or absurd one, people only measure."""
    return clip.bound < MEASURES


def _by_l2_norm(run: Evidence, record: StepRecord, clip: Clip) -> bool:
    """Tell whether what was applied after the clip is within its bound.

    A bound of another ``norm_type`` says nothing of the L2 norm, and may leave one beyond it.
    """
    position = next(n for n, event in enumerate(record.events) if event is clip)
    for event in record.events[position:]:
        if isinstance(event, OptimizerStep) and not set(clip.graded).isdisjoint(event.graded):
            return run.norm_at(event, clip.graded) <= 1.05 * _bound(clip)
    return True


def _bound(clip: Clip) -> float:
    """Return the bound in terms of unscaled gradients."""
    return clip.bound / (1.0 if clip.scale is None else clip.scale.value())


def _norm(clip: Clip) -> float:
    return total(clip.norms.values()) / (1.0 if clip.scale is None else clip.scale.value())
