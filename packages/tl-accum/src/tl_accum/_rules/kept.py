"""Rules about what is lost, left or changed between the micro-batches of a group."""

from __future__ import annotations

from tl_accum._context import Context
from tl_accum._vectors import added, norm, ratio
from tl_accum._words import number, places, several, times
from tl_core import Finding


def left_over(context: Context) -> Finding | None:
    """See gradients of an earlier group that are still there."""
    left = context.left_over
    if not norm(left) or not context.same(added([left, context.total]), context.got):
        return None
    return Finding(
        "previous-cycle-kept",
        f"the gradients still hold the cycle before (norm {number(norm(left))}), on top of what this one's "
        f"{several(context.num_parts, 'micro-batch')} added (norm {number(norm(context.total))})",
        "nothing clears the gradients after an update",
        "call optimizer.zero_grad() after optimizer.step()",
        evidence={"left_over_norm": norm(left)},
    )


def zeroed(context: Context) -> Finding | None:
    """See gradients that are cleared within a group, so that only its last micro-batches reach the optimizer."""
    parts = context.num_parts
    if context.is_kept() or not context.passes:
        return None
    for first in range(1, parts):
        kept = added(context.increments[first:])
        if norm(kept) and context.same(kept, context.got):
            what = (
                f"only the last of {parts} micro-batches reaches the optimizer"
                if first == parts - 1
                else f"only {places(range(first, parts), parts)} reach the optimizer"
            )
            share = norm(context.got) / norm(context.total)
            return Finding(
                "zeroed-per-micro-batch",
                f"{what}: its gradients are {number(share)} of what all of them added together"
                if first == parts - 1
                else f"{what}: their gradients are {number(share)} of what all of them added together",
                "zero_grad() runs in every micro-batch, before its backward()"
                if first == parts - 1
                else f"the gradients are cleared after micro-batch {first}, within the group",
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
    return Finding(
        "clip-per-micro-batch",
        f"the clip at {first.site} changed the gradients in {where}, before all of them were added up: norm "
        f"{number(norm(first.before))} to {number(norm(first.after))} in the first; the update used "
        f"{number(norm(context.got))}, the full batch's {number(norm(context.expected))}",
        "the clip runs in every micro-batch and bounds parts of the sum, the first ones again and again",
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
    again = (
        "what is done to them hits the gradients of the earlier micro-batches again in each later one"
        if len(found) > 1
        else "what is done to them hits only the micro-batches up to there"
    )
    return Finding(
        "gradient-edited",
        f"the gradients were {how} after {where}, before all of them were added up: the update used "
        f"{number(norm(context.got))}, the full batch's {number(norm(context.expected))}",
        again,
        "change gradients (divide, unscale, clip, add noise) once, between the last backward() of a group and "
        "optimizer.step(); or divide the loss instead",
        evidence={"factor": factor, "edited": len(found)},
    )
