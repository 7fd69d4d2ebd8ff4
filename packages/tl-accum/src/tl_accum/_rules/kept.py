"""Rules about gradients that are lost between the micro-batches of a group, or left over."""

from __future__ import annotations

from tl_accum._context import Context
from tl_accum._updates import Pass
from tl_accum._vectors import Vector, added, made_of, norm, only
from tl_accum._words import number, places, several
from tl_core import Finding
from tl_telemetry import Backward


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


def without_backward(context: Context) -> Finding | None:
    """See micro-batches that no backward pass is called for, while the gradients of the others are there."""
    parts = context.num_parts
    ran = {one.place for one in context.passes}
    missing = [place for place in range(parts) if not context.is_reached(place)]
    if not missing or not context.is_kept:
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
