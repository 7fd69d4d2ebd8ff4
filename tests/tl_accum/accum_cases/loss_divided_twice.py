"""Losses that are divided by the number of micro-batches twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "in the loss and at backward()": """\
Gradient accumulation: failed, 1 finding

[loss-divided-twice] cycle 1 of 2: the accumulated gradients are 0.25x the full batch's (norm 0.405 instead of 1.62)
  cause: the loss is divided by the 4 accumulation steps twice
  fix: divide it once: where it is computed, or where backward() is called

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.2352       0.25
  0.bias     0.2665      0.06663      0.25
  2.weight   1.192       0.298        0.25
  2.bias     0.5018      0.1255       0.25""",
    "in the loss and in the gradients": """\
Gradient accumulation: failed, 1 finding

[loss-divided-twice] cycle 1 of 2: the micro-batches' gradients add up to the full batch's (norm 1.62), and are \
multiplied by 0.25 before the step (with the full batch by 1)
  cause: the loss is divided by the 4 accumulation steps, and the gradients are divided by them again
  fix: divide either the loss or the gradients, once

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.2352       0.25
  0.bias     0.2665      0.06663      0.25
  2.weight   1.192       0.298        0.25
  2.bias     0.5018      0.1255       0.25""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Scale = Callable[[int], float]


def _one(k: int) -> float:
    return 1.0


def _k(k: int) -> float:
    return float(k)


def _case(in_loss: Scale, at_backward: Scale = _one, of_gradients: Scale = _one, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
            return (model(batch[0]) - batch[1]).square().mean() / in_loss(k)

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = loss_of(setup.model, batch)
            (loss / at_backward(k)).backward()
            if (setup.step_index + 1) % k == 0:
                for parameter in setup.model.parameters():
                    parameter.grad /= of_gradients(k)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "in the loss and at backward()": _case(_k, _k),
        "in the loss and in the gradients": _case(_k, of_gradients=_k),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "in the loss and at backward()": _case(_k),
        "in the loss and in the gradients": _case(_one, of_gradients=_k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a loss that is divided twice, and multiplied": _case(_k, _k, lambda k: 1.0 / k),
        "a temperature that is the number of micro-batches": _case(_k, lambda k: 4.0),
        "the root of it, twice": _case(lambda k: k**0.5, lambda k: k**0.5),
    }
