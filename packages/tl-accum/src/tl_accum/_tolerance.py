"""How far two gradients may lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tl_accum._vectors import Vector, largest

# What a tensor's rounding errors are measured by: its own largest gradient, or this part of the largest of all (a key
# bias has a gradient of 0, made up of large numbers that cancel).
OF_ALL = 1e-2
# Units in the last place that results in low precision may be off by, of the largest gradient.
LOW_ULPS = 4
# Relative distance of neighbouring numbers in TF32, in which a GPU multiplies float32 numbers where that is allowed.
TF32_EPS = 2.0**-10


@dataclass
class Bounds:
    """The tolerance of one check.

    Attributes:
        rtol: relative tolerance.
        atol: absolute tolerance.
        exact_atol: whether somebody asked for that atol; else it is lowered for gradients that are small themselves.
        low: the coarsest dtype in which the loop computes; None in single precision or finer.
        tf32: whether float32 numbers may be multiplied in TF32.
        floor: of each parameter, how far the loop lies from itself when it is repeated.
    """

    rtol: float
    atol: float
    exact_atol: bool = False
    low: torch.dtype | None = None
    tf32: bool = False
    floor: Mapping[str, float] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """The relative tolerance, widened for low precision."""
        eps = torch.finfo(self.low).eps if self.low is not None else TF32_EPS if self.tf32 else 0.0
        return max(self.rtol, LOW_ULPS * eps)

    def of(self, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """Return how far each parameter's elements may lie from what is expected."""
        every = largest(expected)
        atol = self.atol if self.exact_atol else min(self.atol, self.relative * every)
        return {
            name: atol + self.relative * max(largest({name: value}), OF_ALL * every) + 3.0 * self.floor.get(name, 0.0)
            for name, value in expected.items()
        }

    def length(self, expected: Vector) -> float:
        """Return how far a whole vector may lie from what is expected, relative to its length."""
        every = largest(expected)
        floor = max((self.floor.get(name, 0.0) for name in expected), default=0.0)
        return max(1e-3, 3 * self.relative, 3.0 * floor / every if every else 0.0)


def may_use_tf32(device: str | torch.device) -> bool:
    """Tell whether products of float32 numbers on a device may be made in TF32, as cudnn's are by default."""
    if torch.device(device).type != "cuda":
        return False
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the older flags cannot be read once somebody has set the newer ones (torch 2.9)
        return True
