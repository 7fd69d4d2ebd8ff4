"""Rules about values that are not finite."""

from __future__ import annotations

import math
import re
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

# Operations that make Inf of a divisor, or of an argument, that is 0.
_DIVIDES = re.compile(r"^(log|log2|log10|rsqrt|reciprocal|div|addcdiv)$")


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
            cause=f"{made[0]} in step {first}: {made[1]}",
            fix=made[2],
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
        cause, fix = f"{made[0]} in step {first}: {made[1]}", made[2]
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


def overflow(operations: tuple[Any, ...]) -> tuple[str, str, str] | None:
    """Explain what first was not finite in float16, in a forward pass; None if nothing was, or if it was meant.

    Returns:
        What happened, why, and the fix: ``("pow at model.py:12 overflowed in float16", "the result is ...", "...")``.
    """
    made = next((made for made in operations if not made.backward), None)
    if made is None or made.dtype is not torch.float16 or made.nan or made.given:
        return None
    where = f"at {made.site}" + (f" in module {made.module!r}" if made.module else "")
    if _DIVIDES.search(made.operation):
        return (
            f"{made.operation} {where} made Inf in float16",
            "what it divides by, or takes the logarithm of, is 0 there: numbers below 6e-8 are, an epsilon of 1e-8 too",
            "keep the weights in float32 and compute under torch.autocast, or raise eps"
            if made.operation == "addcdiv"
            else "use an epsilon that float16 can hold (1e-4), or compute this part in float32",
        )
    what = f"{made.operation} {where} overflowed in float16"
    if made.operation == "_to_copy":
        what = f"a value {where} was converted to float16 and overflowed"
    return what, "the result is beyond 65504, the largest float16 number", FLOAT16_FIX


def made_in(run: Evidence, step: int) -> tuple[Any, ...]:
    """Repeat a run up to a step, and return the operations that first made non-finite values of finite ones."""
    origin = run.facts.origin(step)
    return () if origin is None else origin.made
