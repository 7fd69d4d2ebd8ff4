"""Rules about values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tl_amp._acts import attempts
from tl_amp._words import at, telling
from tl_core import Finding
from tl_telemetry import Backward, Evidence, explain_nonfinite
from tl_telemetry import non_finite as telemetry_non_finite

FLOAT16_FIX = (
    "compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use bfloat16"
)


def non_finite(run: Evidence) -> Iterator[Finding]:
    """See losses, applied gradients and final weights that are not finite; an overflow of float16 is told as such."""
    found = list(telemetry_non_finite(run))
    if not found:
        yield from _skipped_losses(run)
    for finding in found:
        first = finding.evidence.get("first_step")
        made = overflow(made_in(run, first)) if isinstance(first, int) else None
        if made is None:
            yield finding
            continue
        yield replace(
            finding,
            rule="float16-overflow",
            cause=f"{made} in step {first}: the result is beyond 65504, the largest float16 number",
            fix=FLOAT16_FIX,
        )


def _skipped_losses(run: Evidence) -> Iterator[Finding]:
    """See losses that are not finite where the scaler skipped the update: no scale helps against them."""
    skipped = {attempt.step for attempt in attempts(run) if not attempt.applied}
    hits = [
        record
        for record in run.records
        if record.step in skipped
        and record.loss is not None
        and not math.isfinite(record.loss)
        and any(
            isinstance(e, Backward) and e.root is not None and not math.isfinite(e.root.value()) for e in record.events
        )
    ]
    if not hits:
        return
    first = hits[0].step
    made = overflow(made_in(run, first))
    if made is not None:
        cause, fix = f"{made} in step {first}: the result is beyond 65504, the largest float16 number", FLOAT16_FIX
    else:
        cause, fix, _ = explain_nonfinite(run, first, at_end=False)
    hit = telling(record.step for record in hits)
    yield Finding(
        rule="non-finite" if made is None else "float16-overflow",
        seen=f"the loss was not finite in {at(hit)} ({hits[0].main_loss} {hits[0].loss:g}), and backward() ran on it: "
        f"the GradScaler skipped {'this update' if len(hits) == 1 else 'these updates'}, and no scale helps against it",
        cause=cause,
        fix=fix,
        steps=hit,
        evidence={"first_step": first, "steps": len(hits)},
    )


def overflow(operations: tuple[Any, ...]) -> str | None:
    """Name the operation of a forward pass that first went beyond float16; None if there is none."""
    made = next((made for made in operations if not made.backward), None)
    if made is None or made.dtype is not torch.float16 or made.nan or made.given:
        return None
    where = f" in module {made.module!r}" if made.module else ""
    if made.operation == "_to_copy":
        return f"a value at {made.site}{where} was converted to float16 and overflowed"
    return f"{made.operation} at {made.site}{where} overflowed in float16"


def made_in(run: Evidence, step: int) -> tuple[Any, ...]:
    """Repeat a run up to a step, and return the operations that first made non-finite values of finite ones."""
    find = run.facts.find_nonfinite
    if find is None:
        return ()
    try:
        return find(step).made
    except Exception:  # noqa: BLE001  a loop that cannot be run a second time only goes without this detail
        return ()
