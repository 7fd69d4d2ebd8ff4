"""Rules about scales that are applied, or divided by, twice: once by the scaler and once more beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tl_amp._acts import (
    SCALED,
    Attempt,
    Passed,
    Unscaled,
    attempts,
    factors_of,
    fresh,
    is_scaled,
    known_scales,
    norms_after,
    norms_at,
    passes,
    total,
    unscalings,
)
from tl_amp._words import at, scale_of, scales, several, telling, together
from tl_core import Finding
from tl_telemetry import Clip, Evidence, OptimizerStep

# A factor as large as this that equals the scale is the scale.
LEAST_SCALE = 16.0
# How close to the scale a quotient of two norms must lie.
NEAR = 1e-2


def scaled_twice(run: Evidence) -> Iterator[Finding]:
    """See losses that are multiplied by the scale more than once."""
    found = unscalings(run)
    hits: list[tuple[Passed, float]] = []
    by_number = False
    for passed in passes(run).values():
        later = next((unscaled for unscaled in found if unscaled.place > passed.place), None)
        if later is None or later.scale < LEAST_SCALE:
            continue
        again = _factors_again(passed, later.scale)
        if again and not _divided_before(run, passed, later):
            by_number |= again[0]
            hits.append((passed, later.scale))
    if not hits:
        return
    sites = together(passed.event.site for passed, _ in hits)
    hit = telling(passed.step for passed, _ in hits)
    factor = scales(scale for _, scale in hits)
    how = "scaler.scale() is called on a loss that is scaled already"
    if by_number:
        how = "the loss is multiplied by a number that equals the scale (scaler.get_scale()), beside scaler.scale()"
    yield Finding(
        rule="scaled-twice",
        seen=f"the loss that backward() at {sites} ran on is multiplied by the scale twice, {factor} each time "
        f"({len(hits)} of {several(len(run.backwards), 'backward pass')}, {at(hit)})",
        cause=f"{how}: the scaler divides the gradients by the scale once, and they stay {factor} times too large",
        fix=f"scale the loss of backward() at {sites} once",
        steps=hit,
        evidence={"passes": len(run.backwards), "twice": len(hits)},
    )


def _factors_again(passed: Passed, scale: float) -> list[bool]:
    """Return, for all that multiplies scaled terms and equals the scale once more, whether it is a plain number."""
    return [
        isinstance(factor, float)
        for term in passed.event.terms or ()
        if term.scaler is not None
        for factor, value in zip(term.factors, factors_of(term), strict=True)
        if math.isclose(value, scale, rel_tol=1e-5)
    ]


class Twice(NamedTuple):
    """Gradients that somebody divided by the scale as well."""

    update: Unscaled
    when: str


def unscaled_by_hand_too(run: Evidence) -> Iterator[Finding]:
    """See gradients that the scaler divides by its scale, and somebody's own code too."""
    by_optimizer: dict[str, list[Unscaled]] = {}
    for unscaled in unscalings(run):
        if unscaled.scale >= LEAST_SCALE and math.isfinite(total(norms_at(unscaled))):
            by_optimizer.setdefault(unscaled.event.optimizer, []).append(unscaled)
    tried = attempts(run)
    for name, found in by_optimizer.items():
        hits = [twice for unscaled in found if (twice := _twice(run, unscaled, tried)) is not None]
        if len(hits) < 2 or 2 * len(hits) < len(found):
            continue
        scale = scale_of(hits[0].update.scale)
        hit = telling(twice.update.step for twice in hits)
        sites = together(twice.update.event.site for twice in hits)
        yield Finding(
            rule="unscaled-twice",
            seen=f"the gradients of {name!r} became {scale} times smaller {together(t.when for t in hits)}, by no "
            f"function of the scaler's, which divided them by {scale} at {sites} as well ({len(hits)} of "
            f"{several(len(found), 'update')}, {at(hit)})",
            cause="the loop divides the gradients by the scale itself, and so does scaler."
            f"{'step' if hits[0].update.event.in_step else 'unscale_'}(): they become {scale} times too small",
            fix=f"leave the division to the scaler: scaler.unscale_({name if name.isidentifier() else 'optimizer'})",
            steps=hit,
            parameters=run.named({i for twice in hits for i in twice.update.event.graded}),
            evidence={"updates": len(found), "twice": len(hits), "scale": hits[0].update.scale},
        )


def _twice(run: Evidence, unscaled: Unscaled, tried: list[Attempt]) -> Twice | None:
    known = passes(run)
    numbers = [number for number in fresh(run, unscaled.event) if number in known]
    now = total(norms_at(unscaled))
    others = [one.place for one in unscalings(run) if one.event.optimizer == unscaled.event.optimizer]
    if (
        numbers
        and not any(known[numbers[-1]].place < place < unscaled.place for place in others)
        and is_scaled(known[numbers[-1]].event, known_scales(run)) == SCALED
    ):
        last = known[numbers[-1]]
        if _divided_before(run, last, unscaled) and not _factors_again(last, unscaled.scale):
            return Twice(unscaled, "between backward() and unscale_()")
    step = next(
        (
            (place, event)
            for place, (_, event) in enumerate(run.events)
            if place > unscaled.place
            and isinstance(event, OptimizerStep)
            and event.optimizer == unscaled.event.optimizer
        ),
        None,
    )
    if step is None or any(unscaled.place < place < step[0] for place in others):
        return None  # the scaler itself divides once more
    if step[1].graded != unscaled.event.graded or step[1].scale is not None:
        return None
    norms = _before_a_clip(run, unscaled.place, step[0], unscaled.event.graded)
    applied = total(step[1].norms.values()) if norms is None else norms
    if _is_scale(now / unscaled.scale, applied, unscaled.scale):
        return Twice(unscaled, "between unscale_() and step()")
    return None


def _divided_before(run: Evidence, last: Passed, unscaled: Unscaled) -> bool:
    """Tell whether somebody divided gradients by the scale after a backward pass, and before they were unscaled."""
    before = norms_after(last.event)
    graded = unscaled.event.graded
    if not set(graded) <= set(before):
        return False
    at_clip = _before_a_clip(run, last.place, unscaled.place, graded)
    now = total(norms_at(unscaled)) if at_clip is None else at_clip
    return _is_scale(total(before[i] for i in graded), now, unscaled.scale)


def _before_a_clip(run: Evidence, first: int, last: int, graded: tuple[int, ...]) -> float | None:
    """Return the norm of gradients when a clip between two acts began; None without one."""
    for _, event in run.events[first:last]:
        if isinstance(event, Clip) and set(graded) <= set(event.graded):
            norms = dict(zip(event.graded, event.norms.values(), strict=True))
            return total(norms[i] for i in graded)
    return None


def _is_scale(before: float, after: float, scale: float) -> bool:
    return 0.0 < after < math.inf and before < math.inf and math.isclose(before / after, scale, rel_tol=NEAR)
