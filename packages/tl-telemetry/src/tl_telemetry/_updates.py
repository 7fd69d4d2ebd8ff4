"""How far a step moves each parameter: one copy of the parameters, and no other memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from tl_telemetry._figures import common_dtype, norms

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
# Optimizers mostly move the same parameters again and again; of a mixture of experts, many different sets.
MAX_COPIED = 16

_spec = attrgetter("shape", "dtype", "device")


@dataclass(slots=True)
class Moved:
    """What a step changed: L2 norms of the change, in the order asked for, and counts for low-precision parameters."""

    norms: list[Tensor]
    low_precision: list[int] = field(default_factory=list)
    # of each low-precision parameter: elements with a gradient; of those, unchanged; sampled elements with a gradient;
    # of those, as they were before the first update
    unchanged: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Copied:
    """The parameters that one optimizer moves, beside their copies."""

    indices: tuple[int, ...]
    tensors: list[Tensor]
    copies: list[Tensor]
    specs: list[object]  # shape, dtype and device of each
    dtype: torch.dtype | None  # their common one
    low_precision: bool  # whether some are


class Updates:
    """Copies parameters before a step, and turns the copies into the change after it."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._first: dict[int, Tensor] = {}
        self._copied: dict[tuple[int, ...], Copied] = {}

    def before(self, indices: tuple[int, ...], tensors: Sequence[Tensor]) -> Copied:
        """Copy the parameters that are about to move. Call it under ``no_grad``.

        Args:
            indices: of the parameters that are about to move.
            tensors: all parameters, by index.
        """
        copied = self._copied.get(indices)
        if copied is None or copied.specs != list(map(_spec, copied.tensors)):
            copied = self._prepare(indices, [tensors[i] for i in indices])
        if indices:
            torch._foreach_copy_(copied.copies, copied.tensors)
        return copied

    def _prepare(self, indices: tuple[int, ...], tensors: list[Tensor]) -> Copied:
        if indices in self._copied or len(self._copied) >= MAX_COPIED:
            self._copied.clear()  # they hold the copies too
        copies = []
        for index, tensor in zip(indices, tensors, strict=True):
            copy = self._copies.get(index)
            if copy is None or _spec(copy) != _spec(tensor):
                copy = self._copies[index] = torch.empty_like(tensor, requires_grad=False)
                if tensor.dtype in LOW_PRECISION:
                    self._first[index] = _sample(tensor.detach()).clone()
            copies.append(copy)
        low_precision = any(tensor.dtype in LOW_PRECISION for tensor in tensors)
        copied = self._copied[indices] = Copied(
            indices, tensors, copies, list(map(_spec, tensors)), common_dtype(tensors), low_precision
        )
        return copied

    def after(self, copied: Copied, asked: tuple[int, ...], count: int) -> Moved:
        """Return how far the ``asked`` parameters moved, at this optimizer's update number ``count``."""
        known, tensors, changes = asked, copied.tensors, copied.copies
        if asked != copied.indices:
            # an index without a copy got its gradient or its shape during the step: nothing is known of its change
            position = {index: at for at, index in enumerate(copied.indices)}
            known = tuple(index for index in asked if index in position)
            tensors = [copied.tensors[position[index]] for index in known]
            changes = [copied.copies[position[index]] for index in known]
        if known:
            torch._foreach_sub_(changes, tensors)
        moved = Moved(norms(changes, copied.dtype))
        if len(known) < len(asked):
            by_index = dict(zip(known, moved.norms, strict=True))
            unknown = torch.full((), float("nan"))
            moved.norms = [by_index.get(index, unknown) for index in asked]
        if copied.low_precision and (count < COUNTED_FIRST or count % COUNTED_EVERY == 0):
            self._count_unchanged(moved, known, tensors)
        return moved

    def _count_unchanged(self, moved: Moved, indices: tuple[int, ...], tensors: list[Tensor]) -> None:
        for index, tensor in zip(indices, tensors, strict=True):
            grad = tensor.grad
            if tensor.dtype in LOW_PRECISION and grad is not None and grad.layout is torch.strided:
                graded = grad != 0
                moved.low_precision.append(index)
                moved.unchanged += [graded.sum(), (graded & (self._copies[index] == 0)).sum()]
                sampled = _sample(graded)
                still = _sample(tensor.detach()) == self._first[index]
                moved.unchanged += [sampled.sum(), (sampled & still).sum()]


def _sample(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // NUM_SAMPLED)]
