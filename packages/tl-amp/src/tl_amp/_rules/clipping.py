"""The rule about clipping gradients that are still multiplied by the loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tl_amp._acts import (
    PARTLY,
    SCALED,
    Stepped,
    direct_steps,
    fresh,
    is_scaled,
    known_scales,
    norms_after,
    passes,
    total,
    unscalings,
)
from tl_amp._rules.in_part import DIVIDED, scales_of
from tl_amp._words import at, number, quoted, scales, several, telling
from tl_core import Finding
from tl_telemetry import Clip, Evidence, OptimizerStep

# No gradient is clipped to this: a call with a bound from here on is made for the norm that it returns.
MEASURES = 1e8
# Nor are unscaled gradients to this.
FAR = 1e3


def clip_before_unscale(run: Evidence) -> Iterator[Finding]:
    """See clip functions that bound gradients before the scaler has divided them by its scale."""
    calls: dict[tuple[str, str], list[tuple[int, Clip, float]]] = {}
    still: set[int] = set()
    for place, (record, event) in enumerate(run.events):
        if isinstance(event, Clip) and math.isfinite(event.bound) and event.bound < MEASURES and event.graded:
            scale, left = _scale_at(run, place, event)
            if scale > 1.0:
                still |= left
                calls.setdefault((event.function, event.site), []).append((record.step, event, scale))
    for (function, site), found in calls.items():
        bounds = [clip.bound for _, clip, _ in found]
        values = [scale for _, _, scale in found]
        if is_meant(bounds, values):
            continue
        norms = [total(clip.norms.values()) for _, clip, _ in found]
        reached = sum(norm > bound for norm, bound in zip(norms, bounds, strict=True) if math.isfinite(norm))
        if not reached and all(bound / value >= FAR for bound, value in zip(bounds, values, strict=True)):
            continue  # made for the norm that it returns
        hit = telling(step for step, _, _ in found)
        graded = {i for _, clip, _ in found for i in clip.graded}
        scaled = still & graded
        whose = "" if scaled == graded else f" of {run.shown(scaled)}"
        names = [name for name, own in run.setup.optimizers.items() if not scaled.isdisjoint(_held(run, own))]
        which = "optimizer)" if len(run.setup.optimizers) == 1 or not names else f"optimizer) for {quoted(names)}"
        largest = max((norm for norm in norms if math.isfinite(norm)), default=math.nan)
        yield Finding(
            rule="clip-before-unscale",
            seen=f"{function}() at {site} ran before unscale_ in {several(len(found), 'call')} ({at(hit)}), on "
            f"gradients{whose} that are still {scales(values)} times too large: a norm of up to "
            f"{number(largest)} against a bound of {_shown(bounds)}, reached in {reached} of them",
            cause="clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is "
            f"bound / scale, {_effective(bounds, values)}",
            fix=f"call scaler.unscale_({which} before {function}() at {site}, once an update",
            steps=hit,
            parameters=run.named(scaled),
            evidence={"calls": len(found), "reached": reached, "bound": bounds[0], "scale": values[0]},
        )


def clip_before_division(run: Evidence) -> Iterator[Finding]:
    """See clips of gradients that somebody's own code divides by the loss scale only afterwards."""
    known = passes(run)
    calls: dict[tuple[str, str], list[tuple[Stepped, Clip, float]]] = {}
    for stepped in direct_steps(run):
        cycle = [known[n] for n in fresh(run, stepped.event) if n in known]
        for place in range(cycle[-1].place, stepped.place) if cycle else ():
            event = run.events[place][1]
            if isinstance(event, Clip) and "norm" in event.function and event.graded == stepped.event.graded:
                before, after = total(event.norms.values()), total(stepped.event.norms.values())
                unclipped = total(norms_after(cycle[-1].event).get(i, math.nan) for i in event.graded)
                for scale in scales_of(run, cycle):
                    reached = before > event.bound * (1 + DIVIDED) and math.isclose(before, unclipped, rel_tol=1e-4)
                    if reached and math.isclose(after * scale, event.bound, rel_tol=DIVIDED):
                        calls.setdefault((event.function, event.site), []).append((stepped, event, scale))
    for (function, site), found in calls.items():
        bounds = [clip.bound for _, clip, _ in found]
        values = [scale for _, _, scale in found]
        if is_meant(bounds, values):
            continue
        hit = telling(stepped.step for stepped, _, _ in found)
        largest = max(total(clip.norms.values()) for _, clip, _ in found)
        yield Finding(
            rule="clip-before-unscale",
            seen=f"{function}() at {site} brought the gradients from a norm of up to {number(largest)} to its bound of "
            f"{_shown(bounds)}, and they were divided by the loss scale of {scales(values)} by hand only after it "
            f"({several(len(found), 'update')}, {at(hit)})",
            cause="clipping comes before the loss scale is undone: the bound that the gradients themselves are held to "
            f"is bound / scale, {_effective(bounds, values)}",
            fix=f"divide the gradients by the loss scale before {function}() at {site}",
            steps=hit,
            parameters=run.named({i for _, clip, _ in found for i in clip.graded}),
            evidence={"updates": len(found), "bound": bounds[0], "scale": values[0]},
        )


def _held(run: Evidence, optimizer: object) -> set[int]:
    groups = getattr(optimizer, "param_groups", [])
    known = (run.tensors.index_of.get(id(parameter)) for group in groups for parameter in group["params"])
    return {i for i in known if i is not None}


def _scale_at(run: Evidence, place: int, clip: Clip) -> tuple[float, set[int]]:
    """Return the scale that gradients of a clip are still multiplied by, and which: 1 if none is, or it is unknown."""
    known = passes(run)
    values = known_scales(run)
    scaled = [
        known[n] for n in fresh(run, clip) if n in known and is_scaled(known[n].event, values) in (SCALED, PARTLY)
    ]
    if not scaled:
        return 1.0, set()
    if clip.in_step is not None:  # a hook of the step: a fused optimizer unscales the gradients itself, after it
        following = (event for _, event in run.events[place:] if isinstance(event, OptimizerStep))
        step = next((event for event in following if event.optimizer == clip.in_step), None)
        if step is not None and step.scale is not None:
            return step.scale.value(), set(clip.graded)
    last = max(passed.place for passed in scaled)
    left = set(clip.graded)
    for unscaled in unscalings(run):
        if last < unscaled.place < place:
            left -= set(unscaled.event.graded)
        elif unscaled.place > place and not left.isdisjoint(unscaled.event.graded):
            return unscaled.scale, left
    return 1.0, set()  # they were unscaled, or nobody unscales them: a step past the scaler


def is_meant(bounds: list[float], values: list[float]) -> bool:
    """Tell whether bounds were multiplied by the scale on purpose (``max_norm * scaler.get_scale()``)."""
    if len(set(values)) > 1:
        first = bounds[0] / values[0]
        along = all(math.isclose(b / s, first, rel_tol=1e-3) for b, s in zip(bounds, values, strict=True))
        return along and not math.isclose(min(bounds), max(bounds), rel_tol=1e-3)
    # with one scale only their roundness tells: 0.5 * 1024 is 512, and 1.0 is a bound that somebody wrote
    return all(_is_round(b / s) and not _is_round(b) for b, s in zip(bounds, values, strict=True))


def _is_round(value: float) -> bool:
    return math.isclose(float(f"{value:.2g}"), value, rel_tol=1e-4)


def _shown(bounds: list[float]) -> str:
    low, high = min(bounds), max(bounds)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _effective(bounds: list[float], values: list[float]) -> str:
    effective = sorted(bound / value for bound, value in zip(bounds, values, strict=True))
    low, high = number(effective[0]), number(effective[-1])
    return low if low == high else f"{low} to {high}"
