"""What a run is compared by, step by step: its losses, and one number for each of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_core import TrainingSetup, split_losses
from tl_telemetry._capture._modules import module_tensors
from tl_telemetry._figures import norms
from tl_telemetry._tensors import is_lazy


@dataclass(frozen=True)
class Divergence:
    """The first place at which two runs part.

    Attributes:
        step: the step.
        what: the loss's name, or the parameter's or buffer's.
        is_loss: whether it is a loss; else it is the L2 norm of a tensor after the step.
        a: the value in the first run.
        b: the value in the second run; both may be missing (None).
    """

    step: int
    what: str
    is_loss: bool
    a: float | None
    b: float | None


class RunTrace:
    """The losses and the L2 norms of all parameters and buffers of a run, kept on the device until they are read.

    Attributes:
        main_loss: the name of the last recorded step's main loss: ``"loss"``, else the first one.
    """

    def __init__(self) -> None:
        self._losses: dict[int, dict[str, Tensor | float]] = {}
        self._norms: dict[int, tuple[tuple[str, ...], Tensor | None]] = {}
        self.main_loss = "loss"

    def add(self, step: int, result: object, setup: TrainingSetup) -> None:
        """Record a step. Does not wait for the device.

        Args:
            step: its index.
            result: what it returned: a loss, or a dict of named ones.
            setup: the setup after it, whose weights are recorded.

        Raises:
            TypeError: what the step returned is no loss.
            ValueError: the loss has not exactly one element.
        """
        self._losses[step], main = split_losses(result, step)
        self.main_loss = self.main_loss if main is None else main
        named = {
            name: tensor.detach()
            for name, tensor in module_tensors(setup.model).items()
            if tensor.is_floating_point() or tensor.is_complex()
            if not is_lazy(tensor) and tensor.numel() and tensor.device.type != "meta"
        }
        with torch.no_grad():
            values = norms(list(named.values()))
            # with weights on the CPU and on an accelerator: only a copy to the accelerator does not wait for it
            device = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
            stacked = torch.stack([value.to(device, non_blocking=True) for value in values]) if values else None
        self._norms[step] = tuple(named), stacked

    @property
    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return list(self._losses)

    def losses(self, step: int) -> Mapping[str, float]:
        """Return the losses of a step by name. Waits for the device."""
        return {name: float(value) for name, value in self._losses[step].items()}

    def norms(self, step: int) -> Mapping[str, float]:
        """Return the L2 norm of each parameter and buffer after a step, by name. Waits for the device."""
        names, values = self._norms[step]
        return {} if values is None else dict(zip(names, values.tolist(), strict=True))


def first_divergence(a: RunTrace, b: RunTrace, *, rtol: float, atol: float, start: int = 0) -> Divergence | None:
    """Find where two runs part: ``abs(a - b) > atol + rtol * abs(a)``. NaN equals NaN, an infinity itself.

    Args:
        a: the first run; its values are what is expected.
        b: the second run.
        rtol: relative tolerance.
        atol: absolute tolerance.
        start: the first step to compare.

    Returns:
        The divergence in the earliest step, of a loss before that of a weight; None where there is none in the steps
        that both have.
    """
    shared = set(b.steps)
    for step in a.steps:
        if step < start or step not in shared:
            continue
        for is_loss, left, right in ((True, a.losses(step), b.losses(step)), (False, a.norms(step), b.norms(step))):
            for name in dict.fromkeys([*left, *right]):
                if not is_close(left.get(name), right.get(name), rtol, atol):
                    return Divergence(step, name, is_loss, left.get(name), right.get(name))
    return None


def is_close(expected: float | None, got: float | None, rtol: float, atol: float) -> bool:
    """Tell whether two figures agree; NaN with NaN, an infinity with itself, a missing one with a missing one."""
    if expected is None or got is None:
        return expected is got
    if expected == got or (expected != expected and got != got):
        return True
    return math.isfinite(expected) and math.isfinite(got) and abs(got - expected) <= atol + rtol * abs(expected)


def largest_gap(a: RunTrace, b: RunTrace, *, stop: int | None = None) -> float:
    """Return the largest relative distance between two runs that should be one: the loop's own noise.

    Args:
        a: the first run.
        b: the same run, repeated.
        stop: the first step that is not compared; None compares all.

    Returns:
        The largest ``abs(a - b) / abs(a)`` of all losses and norms; infinity where only one of them is finite, only
        one is there, or ``a`` alone is zero. NaN equals NaN.
    """
    gap = 0.0
    shared = set(b.steps)
    for step in a.steps:
        if (stop is not None and step >= stop) or step not in shared:
            continue
        for left, right in ((a.losses(step), b.losses(step)), (a.norms(step), b.norms(step))):
            for name in dict.fromkeys([*left, *right]):
                gap = max(gap, _distance(left.get(name), right.get(name)))
    return gap


def _distance(expected: float | None, got: float | None) -> float:
    if is_close(expected, got, 0.0, 0.0):
        return 0.0
    if not expected or got is None or not (math.isfinite(expected) and math.isfinite(got)):
        return math.inf
    return abs(got - expected) / abs(expected)
