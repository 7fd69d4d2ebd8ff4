"""The rule about a loss scale that somebody's own code undoes for some parameters, and not for others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tl_amp._acts import Passed, Stepped, direct_steps, factor, factors_of, fresh, known_scales, norms_after, passes
from tl_amp._words import at, number, scale_of, several, telling, together
from tl_core import Finding
from tl_telemetry import Clip, Evidence

# A number that multiplies a loss and is as large as this is a loss scale rather than a weight.
LEAST_SCALE = 64.0
# How close to the scale a quotient of two norms must lie, and how close to 1 that of a gradient that was left alone.
DIVIDED = 1e-2
ALONE = 1e-4


class Part(NamedTuple):
    """One update whose gradients were divided by the scale in part."""

    stepped: Stepped
    passed: Passed
    scale: float
    divided: tuple[int, ...]
    left: tuple[int, ...]
    worst: tuple[int, float, float]  # of those that were left: a parameter, its norm at the step, and divided


def unscaled_in_part(run: Evidence) -> Iterator[Finding]:
    """See steps with gradients of which some were divided by the loss scale by hand, and others not at all."""
    by_optimizer: dict[str, list[Part]] = {}
    for stepped in direct_steps(run):
        part = _part(run, stepped)
        if part is not None:
            by_optimizer.setdefault(stepped.event.optimizer, []).append(part)
    for name, found in by_optimizer.items():
        last = found[-1]
        hit = telling(part.stepped.step for part in found)
        left = {i for part in found for i in part.left}
        index, norm, divided = last.worst
        scale = scale_of(last.scale)
        sites = together(part.passed.event.site for part in found)
        (worst,) = run.named({index})
        yield Finding(
            rule="unscaled-in-part",
            seen=f"the loss that backward() at {sites} ran on is multiplied by {scale}; before {name!r} stepped, the "
            f"gradients of {run.shown({i for part in found for i in part.divided})} were made {scale} times smaller "
            f"by hand, and those of {run.shown(left)} were left as they were ({len(found)} of "
            f"{several(len(run.steps_by_optimizer.get(name, ())), 'update')}, {at(hit)}; in step {last.stepped.step} "
            f"{worst} had a norm of {number(norm)} instead of {number(divided)})",
            cause="the loop undoes its loss scale for some parameters only: the gradients of the others are "
            f"{scale} times too large",
            fix=f"divide the gradients of all parameters by {scale}, also those of {run.shown(left)}"
            + ("; scaler.step(optimizer) does so by itself" if _of_a_scaler(last.passed) else ""),
            steps=hit,
            parameters=run.named({i for part in found for i in (*part.divided, *part.left)}),
            evidence={"updates": len(found), "scale": last.scale, "norm": norm},
        )


def _of_a_scaler(passed: Passed) -> bool:
    return any(term.scaler is not None for term in passed.event.terms or ())


def _part(run: Evidence, stepped: Stepped) -> Part | None:
    known = passes(run)
    cycle = [known[n] for n in fresh(run, stepped.event) if n in known]
    scales = _scales(run, cycle)
    if not scales:
        return None
    before: dict[int, float] = {}
    for passed in cycle:
        before |= norms_after(passed.event)
    now = _norms_now(run, stepped, cycle[-1].place)
    now = {i: norm for i, norm in now.items() if norm != 0.0 or before.get(i) != 0.0}
    quotients = {i: before[i] / now[i] for i in now if before.get(i, 0.0) > 0.0 and 0.0 < now[i] < math.inf}
    for scale in scales:
        divided = tuple(i for i, q in quotients.items() if math.isclose(q, scale, rel_tol=DIVIDED))
        left = tuple(i for i, q in quotients.items() if math.isclose(q, 1.0, rel_tol=ALONE))
        if divided and left and len(divided) + len(left) == len(now):
            index = max(left, key=lambda i: now[i])
            return Part(stepped, cycle[-1], scale, divided, left, (index, now[index], now[index] / scale))
    return None


def _scales(run: Evidence, cycle: list[Passed]) -> set[float]:
    """Return what multiplies every term of all the losses of an update, and may be a loss scale."""
    found: list[set[float]] = []
    for passed in cycle:
        for term in passed.event.terms or ():
            by_scaler = known_scales(run) if term.scaler is not None else set()
            found.append({value for value in (*factors_of(term), factor(term), *by_scaler) if value >= LEAST_SCALE})
        if not passed.event.terms:
            return set()
    return set.intersection(*found) if found else set()


def _norms_now(run: Evidence, stepped: Stepped, place: int) -> dict[int, float]:
    """Return the norms of the gradients that a step used, as they were before a clip function changed them."""
    graded = stepped.event.graded
    for _, event in run.events[place : stepped.place]:
        if isinstance(event, Clip) and set(graded) <= set(event.graded):
            return {i: norm for i, norm in zip(event.graded, event.norms.values(), strict=True) if i in graded}
    return dict(zip(graded, stepped.event.norms.values(), strict=True))
