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

    Each act costs two copies of all gradients to the CPU, and waits for the device: it is for short runs. Clear
    ``acts`` when they have been read.
    """

    acts: list[GradientAct] = field(default_factory=list)

    def copy(self, follows: Follows) -> Gradients:
        """Return copies of the gradients as they are now; sparse ones are made dense."""
        held = ((index, tensor.grad) for index, tensor in enumerate(follows.tensors))
        return {index: _copied(grad) for index, grad in held if grad is not None}


def _copied(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.layout is not torch.strided:
        return grad.to_dense().to("cpu")
    return grad.to("cpu", copy=True)
