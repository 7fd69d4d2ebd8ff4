"""Whole gradients, act by act, for comparisons that need more than their norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tl_telemetry._events import Backward, Clip, OptimizerStep

Gradients = dict[int, Tensor]


class Follows(Protocol):
    """What keeps the followed parameters, by index."""

    tensors: list[Tensor]


@dataclass(frozen=True)
class GradientAct:
    """The gradients around one backward pass, clip or optimizer step.

    Attributes:
        step: the step's index.
        event: the act.
        before: the gradients when it began, by the parameter's index; those that are None are missing. CPU copies.
        after: the gradients when it ended; empty for an optimizer step, which only uses them.
    """

    step: int
    event: Backward | Clip | OptimizerStep
    before: Gradients
    after: Gradients


@dataclass
class GradientLog:
    """Collects the gradients around each act of a run: ``observe(setup, gradients=log)``.

    Each act reads all gradients twice and waits for the device: it is for short runs. A gradient that stays as it is
    from one act to the next is one copy for both, which nobody may change. Clear ``acts`` when they have been read.
    """

    acts: list[GradientAct] = field(default_factory=list)
    _last: Gradients = field(default_factory=dict, init=False, repr=False)

    def copy(self, follows: Follows) -> Gradients:
        """Return copies of the gradients as they are now; sparse ones are made dense."""
        held = ((index, tensor.grad) for index, tensor in enumerate(follows.tensors))
        self._last = {index: _copied(grad, self._last.get(index)) for index, grad in held if grad is not None}
        return self._last


def _copied(grad: Tensor, last: Tensor | None) -> Tensor:
    grad = grad.detach()
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    now = dense.to("cpu", copy=True)
    if last is not None and last.dtype is now.dtype and torch.equal(last, now):
        return last
    return now
