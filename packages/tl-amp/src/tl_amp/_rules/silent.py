"""The rule about values that overflow in float16 without a trace in the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from tl_amp._acts import attempts
from tl_amp._rules.finite import FLOAT16_FIX, overflow
from tl_core import Finding
from tl_telemetry import Evidence

# Operations whose result is Inf because it is too large.
_GROWS = re.compile(r"^(pow|square|mul|exp2?|expm1|(add|badd|addb)?b?mm|matmul|sum|norm|cumsum|prod)$|convolution")
# Operations that somebody uses to end an overflow on purpose.
_MEANT = re.compile(r"clamp|clip|minimum|where|masked_fill|nan_to_num")


def silent_overflow(run: Evidence) -> Iterator[Finding]:
    """See forward passes in which float16 overflows although the loss stays finite: in the first, middle, last step.

    And in a step whose update was skipped, once updates were made.
    """
    if torch.float16 not in run.autocast or not run.records:
        return
    last = len(run.records) - 1
    skipped = _skipped(run)
    for step in sorted({0, last // 2, last, *skipped}):
        loss = run.records[step].loss
        if loss is not None and not math.isfinite(loss):
            continue  # a rule of its own tells it
        origin = run.facts.origin(step)
        if origin is None:
            return
        found = _made_nan(origin, step) if step in skipped else None
        found = found or _overflown(origin, step)
        if found is not None:
            what, cause, fix, operation = found
            yield Finding(
                rule="float16-overflow",
                seen=what.format(loss="" if loss is None else f", although the loss is {loss:.4g}"),
                cause=cause,
                fix=fix,
                steps=(step,),
                evidence={"operation": operation, "ended_by": origin.ended},
            )
            return


def _skipped(run: Evidence) -> set[int]:
    """Return the first step whose update was skipped after one was made."""
    tried = attempts(run)
    made = next((index for index, attempt in enumerate(tried) if attempt.applied), len(tried))
    late = [attempt.step for attempt in tried[made:] if not attempt.applied and attempt.step < len(run.records)]
    return set(late[:1])


def _overflown(origin: Any, step: int) -> tuple[str, str, str, str] | None:
    """Return what overflowed and was made finite by what took it, unless that was meant."""
    made = next((one for one in origin.made if not one.backward), None)
    if made is None or not (made.above and made.recorded and _GROWS.search(made.operation)):
        return None
    told = overflow((made,))
    if told is None or not origin.ended or _MEANT.search(origin.ended):
        return None
    seen = f"Inf came up in the forward pass of step {step}{{loss}}: {origin.ended}, which took it, made finite values"
    return seen, f"{told[0]}: {told[1]}", told[2], str(made)


def _made_nan(origin: Any, step: int) -> tuple[str, str, str, str] | None:
    """Return what made NaN of infinities in float16, in a forward pass whose update the scaler then skipped."""
    turned = next((one for one in origin.turned if not one.backward), None)
    if turned is None or turned.dtype is not torch.float16 or not turned.recorded:
        return None
    made = next((one for one in origin.made if not one.backward), None)
    where = f" in module {turned.module!r}" if turned.module else ""
    before = f", which {made} had made" if made is not None else ""
    return (
        f"NaN came up in the forward pass of step {step}{{loss}}, and the GradScaler skipped its update",
        f"{turned}{where} made NaN of infinities{before}: float16 ends at 65504, and no scale helps against it",
        "mask with torch.finfo(dtype).min instead of a large number, and leave no row wholly masked; or " + FLOAT16_FIX,
        str(turned),
    )
