"""The rule about values that overflow in float16 without a trace in the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from tl_amp._rules.finite import FLOAT16_FIX, made_in, overflow
from tl_core import Finding
from tl_telemetry import Evidence

# Operations whose result is Inf because it is too large. A sum with a mask's lowest number is meant to be.
_GROWS = re.compile(
    r"^(pow|square|mul|exp|exp2|expm1|mm|bmm|addmm|baddbmm|addbmm|matmul|sum|norm|cumsum|prod)$|convolution"
)


def silent_overflow(run: Evidence) -> Iterator[Finding]:
    """See forward passes in which float16 overflows although the loss stays finite."""
    if torch.float16 not in run.autocast or not run.records:
        return
    made = [one for one in made_in(run, 0) if not one.backward]
    told = overflow(tuple(made))
    if told is None or not _GROWS.search(made[0].operation):
        return
    loss = run.records[0].loss
    if loss is not None and not math.isfinite(loss):
        return  # it is no secret
    yield Finding(
        rule="float16-overflow",
        seen="Inf came up in the forward pass of step 0"
        + ("" if loss is None else f", although the loss is {loss:.4g}")
        + ": what it was used in hid it (as a division by Inf, a tanh or a clamp do)",
        cause=f"{told}: the result is beyond 65504, the largest float16 number",
        fix=FLOAT16_FIX,
        steps=(0,),
        evidence={"operation": str(made[0])},
    )
