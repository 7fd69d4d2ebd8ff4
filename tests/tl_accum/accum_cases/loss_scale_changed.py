"""A loss scale that changes while gradients are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "update() in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[loss-scale-changed] cycle 1 of 2: the loss scale was 256, 512, 512, 512 in the micro-batches of one group, whose \
gradients are added up and divided by the last one: norm 1.59 instead of 1.62
  cause: scaler.update() runs within the group, before its gradients are used
  fix: call scaler.update() once a group, after scaler.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, scaler update
  1     2 of 4       backward, scaler update
  2     3 of 4       backward, scaler update
  3     4 of 4       backward, unscale, optimizer step, zero grad, scaler update
        full batch   backward, unscale, optimizer step, zero grad, scaler update

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.9032       0.96    0.9986
  0.bias     0.2665      0.2852       1.07    0.9963
  2.weight   1.192       1.156        0.9698  0.9995
  2.bias     0.5018      0.5539       1.104   1""",
}

Step = Callable[[TrainingSetup, Any], Any]


def _case(*, update_each: bool, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            setup.scaler.scale(loss / k).backward()
            due = (setup.step_index + 1) % k == 0
            if due:
                setup.scaler.step(setup.optimizer)
                setup.optimizer.zero_grad()
            if due or update_each:
                setup.scaler.update(None if due else 512.0)
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {"update() in every micro-batch": _case(update_each=True)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"update() in every micro-batch": _case(update_each=False)}


def near_misses() -> dict[str, dict[str, Any]]:
    def make_at_start(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if setup.step_index % k == 0 and setup.step_index:
                setup.scaler.update()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            setup.scaler.scale(loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.scaler.step(setup.optimizer)
                setup.optimizer.zero_grad()
            return loss

        return step

    return {
        "a scale that grows after each update": _case(update_each=False, cycles=3),
        "update() when the next group begins": _case(update_each=False, cycles=3) | {"make_step": make_at_start},
        "a disabled scaler": _case(update_each=False) | {"make_setup": _disabled},
    }


def _disabled() -> TrainingSetup:
    model = nn.Linear(6, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
