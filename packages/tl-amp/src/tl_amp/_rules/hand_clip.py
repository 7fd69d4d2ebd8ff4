"""The same rule for clipping that is written by hand: it shows in what it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tl_amp._acts import (
    SCALED,
    Unscaled,
    fresh,
    is_scaled,
    known_scales,
    norms_after,
    norms_at,
    passes,
    total,
    unscalings,
)
from tl_amp._rules.clipping import MEASURES, is_meant
from tl_amp._words import at, number, quoted, scales, several, telling
from tl_core import Finding
from tl_telemetry import Clip, Evidence, Unscaling

# How close to the bound what was clipped to it lies: `max_norm / (norm + 1e-6)` falls short of it a little.
NEAR = 2e-3
# From this difference on, a norm was changed, and norms differ from one another.
CHANGED = 1e-2
# How often a bound is reached before it counts as one; less often where it is reached exactly.
REACHED = 3
REACHED_EXACTLY = 2
EXACT = 1e-4


class Edit(NamedTuple):
    """What somebody did to a gradient, or to all of an optimizer's, between backward() and unscale_()."""

    update: Unscaled
    before: float
    after: float


def clipped_by_hand(run: Evidence) -> Iterator[Finding]:
    """See edits of scaled gradients that hold them to one bound again and again."""
    by_optimizer: dict[str, list[tuple[Unscaled, dict[int, float]]]] = {}
    for unscaled in unscalings(run):
        before = _norms_before(run, unscaled)
        if before:
            by_optimizer.setdefault(unscaled.event.optimizer, []).append((unscaled, before))
    everything = _in_common([pair for found in by_optimizer.values() for pair in found])
    hits = _held(everything) if len(by_optimizer) > 1 else []
    if hits and not _follows_scale(everything, hits):
        what = "the total norm of the gradients"
        yield _finding(run, quoted(by_optimizer), what, hits, everything, len(everything))
        return
    for name, found in by_optimizer.items():
        kinds = (
            ("the norm of each gradient", _each(found)),
            ("the total norm of the gradients", _together(found)),
            ("the largest element of each gradient", _largest(found)),
        )
        # of a single gradient, its norm is the total
        single = all(len(before) == 1 for _, before in found)
        held = [(what, edits, _held(edits)) for what, edits in kinds[1 if single else 0 :]]
        held = [(what, edits, hits) for what, edits, hits in held if hits and not _follows_scale(edits, hits)]
        if held:
            # elements that are all held to a bound leave a total that hardly varies, too
            what, edits, hits = min(held, key=lambda one: round(_spread(one[2]), 5))
            yield _finding(run, repr(name), what, hits, edits, len(found))


def _spread(hits: list[Edit]) -> float:
    after = [edit.after for edit in hits]
    return (max(after) - min(after)) / max(after)


def _norms_before(run: Evidence, unscaled: Unscaled) -> dict[int, float]:
    """Return the norms that the last backward pass left, if nothing but somebody's own code came after it."""
    known = passes(run)
    numbers = [number for number in fresh(run, unscaled.event) if number in known]
    if not numbers:
        return {}
    last = known[numbers[-1]]
    norms = norms_after(last.event)
    graded = unscaled.event.graded
    between = run.events[last.place : unscaled.place]
    if (
        unscaled.event.norms is None
        or is_scaled(last.event, known_scales(run)) != SCALED
        or not set(graded) <= set(norms)
        or any(
            isinstance(event, (Clip, Unscaling)) and not set(event.graded).isdisjoint(graded) for _, event in between
        )
    ):
        return {}
    return {i: norms[i] for i in graded}


def _in_common(found: list[tuple[Unscaled, dict[int, float]]]) -> list[Edit]:
    """Return what became of the gradients of all optimizers together, in each step."""
    steps: dict[int, list[tuple[Unscaled, dict[int, float]]]] = {}
    for unscaled, before in found:
        steps.setdefault(unscaled.step, []).append((unscaled, before))
    return [
        Edit(
            pairs[0][0],
            total(norm for _, before in pairs for norm in before.values()),
            total(norm for unscaled, _ in pairs for norm in norms_at(unscaled)),
        )
        for pairs in steps.values()
    ]


def _together(found: list[tuple[Unscaled, dict[int, float]]]) -> list[Edit]:
    return [Edit(u, total(before.values()), total(norms_at(u))) for u, before in found]


def _each(found: list[tuple[Unscaled, dict[int, float]]]) -> list[Edit]:
    return [
        Edit(u, before[i], after) for u, before in found for i, after in zip(u.event.graded, norms_at(u), strict=True)
    ]


def _largest(found: list[tuple[Unscaled, dict[int, float]]]) -> list[Edit]:
    """Return the largest elements, with the norms before and after as a sign of whether somebody changed them."""
    edits = []
    for u, before in found:
        if u.event.largest is None:
            continue
        rows = zip(u.event.graded, norms_at(u), u.event.largest.values(), strict=True)
        edits += [Edit(u, before[i] / after * largest, largest) for i, after, largest in rows if after > 0.0]
    return edits


def _held(edits: list[Edit]) -> list[Edit]:
    """Return the edits that made something as large as the bound that all of them keep, if there is one."""
    finite = [edit for edit in edits if math.isfinite(edit.before) and math.isfinite(edit.after)]
    bound = max((edit.after for edit in finite), default=0.0)
    if not 0.0 < bound < MEASURES:
        return []
    hits = [e for e in finite if e.after >= bound * (1 - NEAR) and e.before > e.after * (1 + CHANGED)]
    others = [e for e in finite if e not in hits]
    exact = [edit for edit in hits if edit.after >= bound * (1 - EXACT)]
    reached = _num_updates(hits) >= REACHED or _num_updates(exact) >= REACHED_EXACTLY
    before = [edit.before for edit in hits]
    varies = bool(before) and max(before) > min(before) * (1 + CHANGED)
    # what is below the bound is left alone
    alone = all(math.isclose(e.before, e.after, rel_tol=CHANGED) for e in others)
    return hits if reached and varies and alone else []


def _num_updates(edits: list[Edit]) -> int:
    return len({edit.update.place for edit in edits})


def _follows_scale(edits: list[Edit], hits: list[Edit]) -> bool:
    bounds = [edit.after for edit in hits]
    values = [edit.update.scale for edit in hits]
    if len({edit.update.scale for edit in edits}) > 1 and len(set(values)) == 1:
        # the bound was only reached under one scale: under a bound that follows the scale, others keep a smaller one
        return len(
            _held([e._replace(before=e.before / e.update.scale, after=e.after / e.update.scale) for e in edits])
        ) > (len(hits))
    return is_meant(bounds, values)


def _finding(run: Evidence, names: str, what: str, hits: list[Edit], edits: list[Edit], updates: int) -> Finding:
    bound = max(edit.after for edit in hits)
    values = [edit.update.scale for edit in hits]
    hit = telling(edit.update.step for edit in hits)
    before = [edit.before for edit in hits]
    # a bound that all of them reach may be what they are brought to from below, too
    how = ", and left alone below it: the gradients are clipped" if len(edits) > len(hits) else ": they are clipped"
    how += " by hand" if len(edits) > len(hits) else " or normalised by hand"
    return Finding(
        rule="clip-before-unscale",
        seen=f"before unscale_, {what} of {names} was brought to {number(bound)} in "
        f"{_num_updates(hits)} of {several(updates, 'update')} ({at(hit)}), from "
        f"{number(min(before))} to {number(max(before))}{how} while they "
        f"are still {scales(values)} times too large",
        cause="clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is "
        f"bound / scale, {number(bound / values[0])}",
        fix="call scaler.unscale_(optimizer) before the gradients are clipped, once an update",
        steps=hit,
        parameters=run.named({i for edit in hits for i in edit.update.event.graded}),
        evidence={"updates": updates, "reached": len(hits), "bound": bound, "scale": values[0]},
    )
