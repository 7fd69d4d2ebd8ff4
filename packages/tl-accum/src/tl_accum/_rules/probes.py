"""Rules that try something: a step for other accumulation steps, and state that is put back."""

from __future__ import annotations

from collections.abc import Iterator

from tl_accum._compare import gap_with
from tl_accum._context import Context
from tl_accum._differences import STATE_KINDS
from tl_accum._rules.entries import entry
from tl_accum._runs import Part
from tl_accum._updates import updates
from tl_accum._vectors import Vector, added, norm
from tl_accum._words import number, places
from tl_core import Finding

MAX_TRIED = 8


def moving_state(context: Context) -> Finding | None:
    """See state that moves in every micro-batch, and that the gradients depend on."""
    comparison = context.comparison
    for part, moving in list(moving_parts(context))[:MAX_TRIED]:
        try:
            gap = gap_with(comparison, context.number, part)
        except Exception:  # noqa: BLE001  a step that needs what it kept raises what it likes; that tells nothing
            continue
        if gap.timing or any(one.optimizer == context.gap.optimizer for one in gap.gradients):
            continue
        name = entry(comparison, part.piece, part.key)
        return Finding(
            "state-per-micro-batch",
            f"{name} changed in {places(moving, context.num_parts)}, and the gradients depend on it: norm "
            f"{number(norm(context.got))} instead of {number(norm(context.expected))}, and equal to the full batch's "
            "when it is put back before each micro-batch",
            "it is updated in every micro-batch instead of after each update, so that the micro-batches of one group "
            "are computed with different values of it",
            "update it once a group, after optimizer.step(); or compute it from the number of updates",
            evidence={"micro_batches": tuple(moving), "state": str(part.piece)},
        )
    return None


def moving_parts(context: Context) -> Iterator[tuple[Part, list[int]]]:
    """Yield what changed in micro-batches that made no update, and in which ones: entries and attributes first."""
    run = context.comparison.run
    group = run.groups[context.number]
    updating = {update.place for found in updates(run, group).values() for update in found}
    found: dict[Part, list[int]] = {}
    for place, step in enumerate(group.steps):
        held = [change for change in step.changed if change.piece.kind in STATE_KINDS and change.kind != "generator"]
        parts = [Part(change.piece, change.path[0]) for change in held if change.path]
        for part in dict.fromkeys([*parts, *(Part(change.piece) for change in held)]):
            found.setdefault(part, []).append(place)
    moving = [(part, hit) for part, hit in found.items() if not set(hit) <= updating]
    yield from sorted(moving, key=lambda item: item[0].key is None)


def moving_figures(context: Context) -> list[str]:
    """Return the names of the tensors and fractional numbers beside the model that moved in every micro-batch."""
    comparison = context.comparison
    group = comparison.run.groups[context.number]
    found = []
    for part, moving in moving_parts(context):
        held = [
            change
            for change in group.steps[0].changed
            if change.piece == part.piece and change.path[:1] == (part.key,) and part.key is not None
        ]
        if len(moving) == context.num_parts and any(c.tensor or isinstance(c.plain_b, float) for c in held):
            found.append(entry(comparison, part.piece, part.key))
    return found


# By which power of the accumulation steps a part of the loss is divided: as it is due, and otherwise.
_WRONG = {
    (1, 0): ("loss-not-divided", "is not divided by the {k} accumulation steps, the rest is"),
    (1, 2): ("loss-divided-twice", "is divided by the {k} accumulation steps twice, the rest once"),
    (0, 1): ("wrong-loss-scale", "is divided by the {k} accumulation steps, although the loss is a sum over the batch"),
}


def partly_scaled(context: Context) -> Finding | None:
    """See a part of the loss that is divided otherwise than the rest, by steps for two numbers of accumulation steps.

    With a micro-batch's gradients ``a + b`` for one accumulation step, those for ``k`` are ``a / k**q + b / k**p``; two
    numbers ``k`` tell whether there are such ``a`` and ``b``.
    """
    k = context.comparison.plan.accumulation_steps
    if context.num_parts != k or not context.is_kept or not context.singles:
        return None
    if not (context.is_mean or context.is_sum):
        return None
    due = 1 if context.is_mean else 0
    mine, single, other = context.increments[0], context.singles[0], context.increment_for(2 * k)
    for (q, p), (rule, how) in _WRONG.items():
        if q != due:
            continue
        part = added([mine, single], [1.0 / (k**-p - k**-q), -(k**-q) / (k**-p - k**-q)])
        expected = added([single, part], [(2 * k) ** -q, (2 * k) ** -p - (2 * k) ** -q])
        share = norm(part) / norm(single) if norm(single) else 0.0
        if share <= 10 * context.rtol or not context.same(expected, other):
            continue
        reached = _largest(part)
        return Finding(
            rule,
            f"a part of the loss, with gradients of norm {number(norm(part))} (of {number(norm(single))}) in the first "
            f"micro-batch, most of them in {context.shown(reached)}, has another share in the accumulated gradients "
            f"than the rest: norm {number(norm(context.got))} instead of {number(norm(context.expected))}",
            f"that part {how.format(k=k)} (steps made for {k} and for {2 * k} accumulation steps show it)",
            "divide the whole loss by k, once, after its terms are added"
            if q
            else "do not divide terms of a summed loss by k",
            evidence={"part_norm": norm(part), "norm": norm(single)},
        )
    return None


def _largest(part: Vector) -> list[str]:
    """Return the parameters that hold nearly all of a vector."""
    total, held, kept = norm(part) ** 2, 0.0, []
    for name in sorted(part, key=lambda name: -norm({name: part[name]})):
        if held > 0.9 * total:
            break
        kept.append(name)
        held += norm({name: part[name]}) ** 2
    return kept
