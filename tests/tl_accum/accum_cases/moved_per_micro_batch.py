"""Weights that a step changes without the optimizer, in every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a decay by hand": """\
Gradient accumulation: failed, 1 finding

[moved-per-micro-batch] all 4 parameters changed in micro-batches 1, 2 and 3 of 4 of cycle 1 of 2, in which no \
optimizer stepped
  cause: the step changes the weights, or a buffer, itself (a decay by hand, a clamp, an update by hand) in \
micro-batches that make no update
  fix: do it where the optimizer steps, in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.9403       0.9995
  0.bias     0.2665      0.268        1.005
  2.weight   1.192       1.196        1.004
  2.bias     0.5018      0.5157       1.028""",
    "one parameter": """\
Gradient accumulation: failed, 1 finding

[moved-per-micro-batch] 2.bias changed in micro-batches 1, 2 and 3 of 4 of cycle 1 of 2, in which no optimizer stepped
  cause: the step changes the weights, or a buffer, itself (a decay by hand, a clamp, an update by hand) in \
micro-batches that make no update
  fix: do it where the optimizer steps, in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.9413       1.001
  0.bias     0.2665      0.2678       1.005
  2.weight   1.192       1.193        1.001
  2.bias     0.5018      0.5048       1.006""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Change = Callable[[nn.Module], Any]


def _case(change: Change, *, every: bool, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            due = (setup.step_index + 1) % k == 0
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if every or due:
                with torch.no_grad():
                    change(setup.model)
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.99)


def _noise(model: nn.Module) -> None:
    model[2].bias.add_(0.001)


def buggy() -> dict[str, dict[str, Any]]:
    return {"a decay by hand": _case(_decay, every=True), "one parameter": _case(_noise, every=True)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"a decay by hand": _case(_decay, every=False), "one parameter": _case(_noise, every=False)}


def near_misses() -> dict[str, dict[str, Any]]:
    def swapped(k: int) -> Step:
        # weights that are changed for a forward pass, and put back
        def step(setup: TrainingSetup, batch: Any) -> Any:
            kept = [parameter.detach().clone() for parameter in setup.model.parameters()]
            with torch.no_grad():
                _decay(setup.model)
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            with torch.no_grad():
                for parameter, value in zip(setup.model.parameters(), kept, strict=True):
                    parameter.copy_(value)
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-5.0, 5.0)

    return {
        "a clamp that changes nothing": _case(clamp, every=True),
        "weights that are put back": _case(clamp, every=False) | {"make_step": swapped},
    }
