"""Rules about what is lost, left or changed between the micro-batches of a group."""

from __future__ import annotations

from tl_accum._context import Context
from tl_accum._updates import Change, Pass, updates
from tl_accum._vectors import Vector, added, agrees, made_of, norm, only, ratio
from tl_accum._words import number, places, several, times
from tl_core import Finding
from tl_telemetry import Backward, Clip


def left_over(context: Context) -> Finding | None:
    """See gradients of an earlier group that are still there."""
    left = context.left_over
    if not norm(left) or not context.same(added([left, context.total]), context.got):
        return None
    return Finding(
        "previous-cycle-kept",
        f"the gradients still hold the cycle before (norm {number(norm(left))}), on top of what this one's "
        f"{several(context.num_parts, 'micro-batch')} added (norm {number(norm(context.total))})",
        "nothing cleared these gradients after the update before",
        "call optimizer.zero_grad() after optimizer.step()",
        evidence={"left_over_norm": norm(left)},
    )


def other_passes(context: Context) -> Finding | None:
    """See gradients of backward passes that the full batch's update has nothing of, or the other way round."""
    wanted = _coefficients(context, context.expected, context.reference_passes)
    made = _coefficients(context, context.got, context.passes)
    if wanted is None or made is None or len(wanted) < 2:
        return None
    due = {one.ordinal: used for one, used in zip(context.reference_passes, wanted, strict=True)}
    extra = [one for one, used in zip(context.passes, made, strict=True) if used and not due.get(one.ordinal, True)]
    if not extra:
        return _never_ran(context, {ordinal for ordinal, used in due.items() if used})
    sites = ", ".join(dict.fromkeys(one.site for one in extra))
    where = places((one.place for one in extra), context.num_parts)
    return Finding(
        "other-loss-kept",
        f"the accumulated gradients hold what backward() at {sites} added in {where} (norm "
        f"{number(norm(added(one.added for one in extra)))}); with the full batch it is cleared before the update",
        "a loss that is meant for other parameters reaches these too, and its gradients are not cleared in every "
        "micro-batch",
        "keep that loss's gradients away from these parameters: backward(inputs=...), or requires_grad_(False) while "
        "it runs",
        evidence={"passes": len(extra)},
    )


def _never_ran(context: Context, due: set[int]) -> Finding | None:
    """See micro-batches without the backward pass that the full batch's update is made of, among several."""
    ran = {one.place for one in context.passes if one.ordinal in due}
    missing = [place for place in range(context.num_parts) if place not in ran]
    if not due or not missing or not ran:
        return None
    sites = ", ".join(dict.fromkeys(one.site for one in context.passes if one.ordinal in due))
    others = ", ".join(dict.fromkeys(one.site for one in context.reference_passes if one.ordinal not in due))
    return Finding(
        "micro-batch-without-backward",
        f"the full batch's update is made of what backward() at {sites} added, and that pass did not run in "
        f"{places(missing, context.num_parts)}: what backward() at {others} added there is cleared before the update "
        f"(gradients of {context.norms()})",
        "the last backward pass of the step (with the weights perturbed, as in SAM) runs in some micro-batches only",
        "keep the group's micro-batches, and run the last pass on each of them before the step",
        evidence={"micro_batches": tuple(missing)},
    )


def _coefficients(context: Context, target: Vector, found: list[Pass]) -> list[int] | None:
    """Return which backward passes a gradient is the sum of; None where it is no such sum."""
    factors = made_of(target, [one.added for one in found], context.rtol)
    if factors is None or any(min(abs(factor), abs(factor - 1.0)) > 0.01 for factor in factors):
        return None
    return [round(factor) for factor in factors]


def scale_changed(context: Context) -> Finding | None:
    """See gradients of different loss scales that are added up."""
    comparison = context.comparison
    scales = [step.scale for step in comparison.run.groups[context.number].steps]
    if len(set(scales)) < 2 or not context.same(context.total, context.expected):
        return None
    listed = ", ".join(f"{scale:g}" for scale in scales)
    return Finding(
        "loss-scale-changed",
        f"the loss scale was {listed} in the micro-batches of one group, whose gradients are added up and divided by "
        f"the last one: {context.norms()}",
        "scaler.update() runs within the group, before its gradients are used",
        "call scaler.update() once a group, after scaler.step()",
        evidence={"scales": tuple(scales)},
    )


def zeroed(context: Context) -> Finding | None:
    """See gradients that are cleared within a group, so that only its last micro-batches reach the optimizer."""
    parts = context.num_parts
    names = [gap.name for gap in context.gap.parameters]  # others may be cleared in time
    got, total = only(context.got, names), only(context.total, names)
    if not context.passes or context.same(total, got):
        return None
    cleared = {
        change.place
        for change in context.changes
        if norm(only(change.before, names)) and not norm(only(change.after, names))
    }
    for first in range(1, parts):
        kept = only(added(context.increments[first:]), names)
        if norm(kept) and context.same(kept, got):
            what = (
                f"only the last of {parts} micro-batches reaches"
                if first == parts - 1
                else f"only {places(range(first, parts), parts)} reach"
            )
            where = "" if set(names) == set(context.names) else f" in {context.shown(names)}"
            when = f"after {places(cleared, parts)}" if cleared else "within the group"
            return Finding(
                "zeroed-per-micro-batch",
                f"{what} the optimizer{where}: with a norm of {number(norm(got))}, where all of them added "
                f"{number(norm(total))} together",
                f"the gradients are cleared (by zero_grad(), or by hand) {when}, before all of them were added up",
                "call zero_grad() once a group: after optimizer.step(), in the same branch",
                evidence={"first_kept": first},
            )
    return None


def clipped(context: Context) -> Finding | None:
    """See clips that run within a group."""
    found = [change for change in context.changes if change.what == "clip"]
    if not found or context.is_kept():
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
    if not found or context.is_kept():
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
    if factor is None or not context.number or not context.is_kept():
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


def without_backward(context: Context) -> Finding | None:
    """See micro-batches that no backward pass is called for, while the gradients of the others are there."""
    parts = context.num_parts
    ran = {one.place for one in context.passes}
    missing = [place for place in range(parts) if not context.is_reached(place)]
    if not missing or not context.is_kept():
        return None
    if not ran:
        told = norm(context.got) or context.comparison.run.groups[context.number].has(Backward)
        return None if told else _never_backward(context)
    # one backward pass over the sum of all losses reaches every micro-batch: only its own loss in it tells
    if not all(context.reaches_only(place) for place in ran):
        return None
    return Finding(
        "micro-batch-without-backward",
        f"no backward pass in {places(missing, parts)} reached these parameters: the accumulated gradients are those "
        f"of {places(ran, parts)} alone ({context.norms()})",
        "undecided: backward() is called under a condition that is not true there, or the forward pass runs under "
        "no_grad() there (meant for no_sync())",
        "run the forward pass with gradients and call backward() in every micro-batch",
        evidence={"micro_batches": tuple(missing)},
    )


def _never_backward(context: Context) -> Finding:
    return Finding(
        "micro-batch-without-backward",
        f"no backward pass ran in {several(context.num_parts, 'micro-batch')}, so that the optimizer had nothing to "
        f"apply (the full batch's gradients have a norm of {number(norm(context.expected))})",
        "the condition under which backward() is called was true in none of them",
        "call backward() in every micro-batch",
        evidence={"micro_batches": tuple(range(context.num_parts))},
    )
