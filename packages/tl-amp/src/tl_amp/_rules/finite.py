"""Rules about values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tl_core import Finding
from tl_telemetry import Evidence
from tl_telemetry import non_finite as telemetry_non_finite

FLOAT16_FIX = (
    "compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use bfloat16"
)


def non_finite(run: Evidence) -> Iterator[Finding]:
    """See losses, applied gradients and final weights that are not finite; an overflow of float16 is told as such."""
    for finding in telemetry_non_finite(run):
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


def overflow(operations: tuple[Any, ...]) -> str | None:
    """Name the operation of a forward pass that first went beyond float16; None if there is none."""
    made = next((made for made in operations if not made.backward), None)
    if made is None or made.dtype is not torch.float16 or made.nan or made.given:
        return None
    where = f" in module {made.module!r}" if made.module else ""
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
