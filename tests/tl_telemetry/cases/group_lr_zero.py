"""A parameter group whose learning rate comes out as 0 by an integer division."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[group-lr-zero] the learning rate of group 0 of 'optimizer' (0.* (2 tensors)) was 0 in all of its 6 updates (steps \
0-5), while others had 0.05
  cause: undecided: the group is frozen by its rate on purpose, or the rate comes out as 0 by mistake (an integer \
division such as `base // 10`, a schedule of its own)
  fix: nothing, if it is meant (requires_grad_(False) says so, and saves its gradients); else give the group its \
learning rate"""


def _case(encoder_lr: float, freeze: bool = False, factors: Any = None) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(not freeze)
        groups = [{"params": model[0].parameters(), "lr": encoder_lr}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        return TrainingSetup(model, optimizer, lr_scheduler.LambdaLR(optimizer, factors) if factors else None)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        for scheduler in setup.schedulers.values():
            scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(encoder_lr=0.05 // 10)


def healthy() -> dict[str, Any]:
    return _case(encoder_lr=0.05 / 10)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a frozen group": _case(0.0, freeze=True),
        "a group that starts later": _case(0.05, factors=[lambda step: float(step > 2), lambda step: 1.0]),
    }
