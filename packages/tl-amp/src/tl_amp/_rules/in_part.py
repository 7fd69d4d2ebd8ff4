"""The rule about a loss scale that somebody's own code undoes for some parameters, and not for others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tl_amp._acts import Passed, Stepped, direct_steps, factor, factors_of, fresh, known_scales, norms_after, passes
from tl_amp._words import at, number, quoted, scale_of, several, telling, together
from tl_core import Finding
from tl_telemetry import Clip, Evidence

# A number that multiplies a loss and is as large as this is a loss scale rather than a weight.
LEAST_SCALE = 64.0
# How close to the scale a quotient of two norms must lie, and how close to 1 that of a gradient that was left alone.
DIVIDED = 1e-2
ALONE = 1e-4


class Undone(NamedTuple):
    """One update whose gradients were divided by the loss scale by hand: of some parameters, or of all."""

    step: int
    optimizers: tuple[str, ...]
    passed: Passed  # the last backward pass
    scale: float
    divided: tuple[int, ...]
    left: tuple[int, ...]  # parameters whose gradients are still multiplied by the scale
    now: dict[int, float]  # norms of the gradients that were used, by parameter


def unscaled_in_part(run: Evidence) -> Iterator[Finding]:
    """See steps with gradients of which some were divided by the loss scale by hand, and others not at all."""
    updates = undone_by_hand(run)
    found = [undone for undone in updates if undone.left]
    if not found:
        return
    last = found[-1]
    hit = telling(undone.step for undone in found)
    left = {i for undone in found for i in undone.left}
    divided = {i for undone in found for i in undone.divided}
    index = max(last.left, key=lambda i: last.now[i])
    scale = scale_of(last.scale)
    names = [name for undone in found for name in undone.optimizers]
    count = max(len(run.steps_by_optimizer.get(name, ())) for name in names)
    by_scaler = any(term.scaler is not None for term in last.passed.event.terms or ())
    yield Finding(
        rule="unscaled-in-part",
        seen=f"the loss that backward() at {together(undone.passed.event.site for undone in found)} ran on is "
        f"multiplied by {scale}; before {quoted(names)} stepped, the gradients of {run.shown(divided)} were made "
        f"{scale} times smaller by hand, and those of {run.shown(left)} were left as they were ({len(found)} of "
        f"{several(count, 'update')}, {at(hit)}; in step {last.step} {run.shown({index})} had a norm of "
        f"{number(last.now[index])} instead of {number(last.now[index] / last.scale)})",
        cause="the loop undoes its loss scale for some parameters only: the gradients of the others are "
        f"{scale} times too large",
        fix=f"divide the gradients of all parameters by {scale}, also those of {run.shown(left)}"
        + ("; scaler.step(optimizer) does so by itself" if by_scaler else ""),
        steps=hit,
        parameters=run.named(left | divided),
        evidence={"updates": count, "in_part": len(found), "scale": last.scale},
    )


def undone_by_hand(run: Evidence) -> list[Undone]:
    """Return the updates before which somebody divided gradients by what had multiplied their losses."""
    known = passes(run)
    updates: dict[tuple[int, ...], list[Stepped]] = {}
    for stepped in direct_steps(run):
        numbers = tuple(number for number in fresh(run, stepped.event) if number in known)
        if numbers:
            updates.setdefault(numbers, []).append(stepped)  # several optimizers may use one backward pass
    found = (_undone(run, steps, [known[number] for number in numbers]) for numbers, steps in updates.items())
    return [undone for undone in found if undone is not None]


def _undone(run: Evidence, steps: list[Stepped], cycle: list[Passed]) -> Undone | None:
    scales = scales_of(run, cycle)
    if not scales:
        return None
    before: dict[int, float] = {}
    for passed in cycle:
        before |= norms_after(passed.event)
    now: dict[int, float] = {}
    rates: dict[int, float] = {}
    for stepped in steps:
        now |= _norms_now(run, stepped, cycle[-1].place)
        rates |= _rates(run, stepped)
    now = {i: norm for i, norm in now.items() if norm != 0.0 or before.get(i) != 0.0}
    quotients = {i: before[i] / now[i] for i in now if before.get(i, 0.0) > 0.0 and 0.0 < now[i] < math.inf}
    for scale in scales:
        divided = tuple(i for i, q in quotients.items() if math.isclose(q, scale, rel_tol=DIVIDED))
        left = tuple(i for i, q in quotients.items() if math.isclose(q, 1.0, rel_tol=ALONE))
        if not divided or len(divided) + len(left) != len(now):
            continue
        least = min(rates.get(i, math.inf) for i in divided)
        # a learning rate that is as much smaller undoes a scale as well
        kept = tuple(i for i in left if not rates.get(i, math.inf) <= 2.0 * least / scale)
        names = tuple(dict.fromkeys(stepped.event.optimizer for stepped in steps))
        return Undone(steps[0].step, names, cycle[-1], scale, divided, kept, now)
    return None


def scales_of(run: Evidence, cycle: list[Passed]) -> set[float]:
    """Return what multiplies every term of all the losses of an update, and may be a loss scale."""
    found: list[set[float]] = []
    for passed in cycle:
        if not passed.event.terms:
            return set()
        for term in passed.event.terms:
            by_scaler = known_scales(run) if term.scaler is not None else set()
            found.append({value for value in (*factors_of(term), factor(term), *by_scaler) if value >= LEAST_SCALE})
    return set.intersection(*found) if found else set()


def _norms_now(run: Evidence, stepped: Stepped, place: int) -> dict[int, float]:
    """Return the norms of the gradients that a step used, as they were before a clip function changed them."""
    graded = stepped.event.graded
    for _, event in run.events[place : stepped.place]:
        if isinstance(event, Clip) and set(graded) <= set(event.graded):
            return {i: norm for i, norm in zip(event.graded, event.norms.values(), strict=True) if i in graded}
    return dict(zip(graded, stepped.event.norms.values(), strict=True))


def _rates(run: Evidence, stepped: Stepped) -> dict[int, float]:
    """Return the learning rate of each parameter of a step; nothing where groups came or went since."""
    groups = getattr(run.setup.optimizers.get(stepped.event.optimizer), "param_groups", [])
    if len(groups) != len(stepped.event.lrs):
        return {}
    found: dict[int, float] = {}
    for group, lr in zip(groups, stepped.event.lrs, strict=True):
        value = lr if isinstance(lr, (int, float)) else lr.value()
        found |= {run.tensors.index_of[id(p)]: value for p in group["params"] if id(p) in run.tensors.index_of}
    return found
