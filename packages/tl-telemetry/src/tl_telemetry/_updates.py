"""How far a step moves each parameter: one copy of the parameters, and no other memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._figures import norms

# In float16 and bfloat16, elements are counted in the first updates and then in every 16th: the count reads each
# element several times, and rounding does not change its nature from one update to the next.
COUNTED_FIRST = 4
COUNTED_EVERY = 16
LOW_PRECISION = (torch.float16, torch.bfloat16)
# Of each low-precision parameter, about so many elements are kept as they were at first: rounding that is made up for
# (stochastic rounding, Kahan summation) shows over several updates, not in one.
NUM_SAMPLED = 4096
# How many figures there are of each counted parameter; see Moved.
COUNTS = 4


@dataclass(slots=True)
class Moved:
    """What a step changed: L2 norms of the change, in the order asked for, and counts for low-precision parameters."""

    norms: list[Tensor]
    low_precision: list[int] = field(default_factory=list)
    # of each low-precision parameter: elements with a gradient; of those, unchanged; sampled elements with a gradient;
    # of those, as they were before the first update
    unchanged: list[Tensor] = field(default_factory=list)


class Updates:
    """Copies parameters before a step, and turns the copies into the change after it."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._first: dict[int, Tensor] = {}
        self._before: list[tuple[int, Tensor]] = []

    def before(self, moving: list[tuple[int, Tensor]]) -> None:
        """Copy the parameters (index, tensor) that are about to move. Call it under ``no_grad``."""
        self._before = moving
        copies = []
        for index, tensor in moving:
            copy = self._copies.get(index)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or copy.device != tensor.device:
                copy = self._copies[index] = torch.empty_like(tensor, requires_grad=False)
                if tensor.dtype in LOW_PRECISION:
                    self._first[index] = _sample(tensor.detach()).clone()
            copies.append(copy)
        if copies:
            torch._foreach_copy_(copies, [tensor for _, tensor in moving])

    def after(self, asked: Sequence[int], count: int) -> Moved:
        """Return how far the ``asked`` parameters moved, at this optimizer's update number ``count``."""
        if not asked:
            return Moved([])
        tensors = dict(self._before)
        # an index without a copy got its gradient or its shape during the step: nothing is known of its change
        known = [index for index in asked if index in tensors]
        changes = [self._copies[index] for index in known]
        if changes:
            torch._foreach_sub_(changes, [tensors[index] for index in known])
        by_index = dict(zip(known, norms(changes), strict=True))
        if len(known) == len(asked):
            moved = Moved(list(by_index.values()))
        else:
            unknown = torch.full((), float("nan"))
            moved = Moved([by_index.get(index, unknown) for index in asked])
        if count < COUNTED_FIRST or count % COUNTED_EVERY == 0:
            for index in known:
                grad = tensors[index].grad
                if tensors[index].dtype in LOW_PRECISION and grad is not None and grad.layout is torch.strided:
                    graded = grad != 0
                    moved.low_precision.append(index)
                    moved.unchanged += [graded.sum(), (graded & (self._copies[index] == 0)).sum()]
                    sampled = _sample(graded)
                    still = _sample(tensors[index].detach()) == self._first[index]
                    moved.unchanged += [sampled.sum(), (sampled & still).sum()]
        return moved


def _sample(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // NUM_SAMPLED)]
