"""Rules about what comes after unscale_(), and about what moves only where updates are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tl_amp._acts import (
    PARTLY,
    SCALED,
    Unscaled,
    attempts,
    fresh,
    is_scaled,
    known_scales,
    norms_after,
    norms_at,
    passes,
    scaler_updates,
    unscalings,
)
from tl_amp._words import at, quoted, scale_of, scales, several, telling, together
from tl_core import Finding
from tl_telemetry import Backward, Evidence, ScalerUpdate


def backward_after_unscale(run: Evidence) -> Iterator[Finding]:
    """See backward passes that add scaled gradients to ones that were unscaled for the same update."""
    known = known_scales(run)
    tried = attempts(run)
    hits: list[tuple[int, Backward, str, float]] = []
    for unscaled in unscalings(run):
        if unscaled.event.in_step:
            continue
        name = unscaled.event.optimizer
        end = next((a.place for a in tried if a.optimizer == name and a.place > unscaled.place), None)
        graded = set(unscaled.event.graded)
        for _, event in run.events[unscaled.place : end] if end is not None else ():
            if isinstance(event, ScalerUpdate):
                break  # of an accumulation that is unscaled in every micro-batch
            scaled = isinstance(event, Backward) and is_scaled(event, known) in (SCALED, PARTLY)
            if scaled and isinstance(event, Backward) and not graded.isdisjoint(event.filled):
                hits.append((unscaled.step, event, unscaled.event.site, unscaled.scale))
    if not hits:
        return
    hit = telling(step for step, _, _, _ in hits)
    sites = together(event.site for _, event, _, _ in hits)
    values = scales(scale for _, _, _, scale in hits)
    yield Finding(
        rule="backward-after-unscale",
        seen=f"backward() at {sites} ran after scaler.unscale_() at {together(site for _, _, site, _ in hits)}, and "
        f"before the optimizer's step ({several(len(hits), 'time')}, {at(hit)})",
        cause=f"it adds gradients that are still multiplied by {values} to ones that are not, and scaler.step() does "
        "not divide them again",
        fix="call backward() on all losses of an update first, then scaler.unscale_(), scaler.step() and "
        "scaler.update()",
        steps=hit,
        parameters=run.named({i for _, event, _, _ in hits for i in event.filled}),
        evidence={"times": len(hits)},
    )


def hidden_from_scaler(run: Evidence) -> Iterator[Finding]:
    """See gradients that held Inf or NaN after their backward pass, and none when the scaler looked."""
    known = passes(run)
    hits: list[tuple[int, str, set[int]]] = []
    for unscaled in unscalings(run):
        before: dict[int, float] = {}
        sites = []
        for number in fresh(run, unscaled.event):
            if number in known:
                before |= norms_after(known[number].event)
                sites.append(known[number].event.site)
        after = dict(zip(unscaled.event.graded, norms_at(unscaled), strict=False))
        mended = {i for i, norm in after.items() if math.isfinite(norm) and not math.isfinite(before.get(i, 0.0))}
        if mended:
            hits.append((unscaled.step, together(sites), mended))
    if not hits:
        return
    hit = telling(step for step, _, _ in hits)
    parameters = {i for _, _, mended in hits for i in mended}
    yield Finding(
        rule="overflow-hidden",
        seen=f"gradients of {run.shown(parameters)} held Inf or NaN after backward() at "
        f"{together(site for _, site, _ in hits)}, and none when the GradScaler looked at them ({at(hit)})",
        cause="something replaces what is not finite in between (nan_to_num, a clamp, zeros): the scaler sees no "
        "overflow, applies what is left of the gradients, and does not lower its scale",
        fix="leave gradients as they are until scaler.step(): it skips the step and lowers the scale",
        steps=hit,
        parameters=run.named(parameters),
        evidence={"updates": len(hits)},
    )


def scale_changed_between(run: Evidence) -> Iterator[Finding]:
    """See gradients of backward passes under different loss scales, divided by one of them."""
    known = passes(run)
    hits: list[tuple[Unscaled, list[float]]] = []
    for unscaled in unscalings(run):
        own = [u for u in scaler_updates(run) if u.event.scaler == unscaled.event.scaler and u.event.before is not None]
        values = {unscaled.scale}
        for place in (known[n].place for n in fresh(run, unscaled.event) if n in known):
            later = next((u for u in own if place < u.place < unscaled.place), None)
            if later is not None and later.event.before is not None:
                values.add(later.event.before.value())
        if len(values) > 1 and all(map(math.isfinite, values)):
            hits.append((unscaled, sorted(values)))
    if not hits:
        return
    hit = telling(unscaled.step for unscaled, _ in hits)
    names = quoted(unscaled.event.optimizer for unscaled, _ in hits)
    first = " and ".join(scale_of(value) for value in hits[0][1])
    yield Finding(
        rule="scale-changed-between",
        seen=f"gradients of {names} were added up under different loss scales ({first} the first time), and divided by "
        f"one of them ({several(len(hits), 'update')}, {at(hit)})",
        cause="scaler.update() changed the scale between the backward passes of one update: another optimizer that "
        "shares the scaler was updated in between, or update() runs on every micro-batch",
        fix="call scaler.update() only when no optimizer has gradients to apply, or give each optimizer a GradScaler "
        "of its own",
        steps=hit,
        evidence={"updates": len(hits)},
    )


def moves_only_on_skipped(run: Evidence) -> Iterator[Finding]:
    """See schedulers that move where the scaler skips an update, and stand still where it is made."""
    tried = attempts(run)
    skipped = {attempt.step for attempt in tried if not attempt.applied}
    applied = {attempt.step for attempt in tried if attempt.applied} - skipped
    for name in run.setup.schedulers:
        moved = {record.step for record, event in run.scheduler_steps if event.scheduler == name}
        hit = sorted(moved & skipped)
        if len(hit) < 2 or moved & applied or len(hit) < len(skipped) - 1 or len(applied) < len(hit):
            continue
        yield Finding(
            rule="moves-only-on-skipped",
            seen=f"scheduler {name!r} stepped only where the GradScaler skipped the update ({at(hit)}), and in none of "
            f"{several(len(applied), 'update')} that were made",
            cause="the condition that guards scheduler.step() is the wrong way round: the scale falls where an update "
            "is skipped, and stays or grows where it is made",
            fix="`before = scaler.get_scale(); scaler.step(optimizer); scaler.update()`, then scheduler.step() only if "
            "`scaler.get_scale() >= before`",
            steps=telling(hit),
            evidence={"skipped": len(hit), "applied": len(applied)},
        )
