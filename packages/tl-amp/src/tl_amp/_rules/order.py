"""Rules about what comes after unscale_(), and about what moves only where updates are skipped."""

from __future__ import annotations

from collections.abc import Iterator

from tl_amp._acts import PARTLY, SCALED, attempts, is_scaled, known_scales, unscalings
from tl_amp._words import at, scales, several, telling, together
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
