"""Buffers that move in every forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a running mean that is only kept": """\
Gradient accumulation: passed, 1 note

Notes:
[buffers-per-forward] 0.mean moved in every forward pass, so once a micro-batch; gradients and weights agree all the \
same
  fix: nothing, if these statistics may move faster with accumulation; else scale their momentum""",
}

Step = Callable[[TrainingSetup, Any], Any]


class Centred(nn.Module):
    """Keeps a running mean of what it sees, and does not use it in training."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.momentum:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), self.momentum)
        return x


def _case(*layers: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(*[layer() for layer in layers], nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {"a running mean that is only kept": _case(lambda: Centred(0.1))}


def healthy() -> dict[str, dict[str, Any]]:
    return {"a running mean that is only kept": _case(lambda: Centred(0.0))}


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "frozen batch norm": _case() | {"make_setup": _frozen_norm},
        "group norm": _case(lambda: nn.GroupNorm(2, 6)),
    }


def _frozen_norm() -> TrainingSetup:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    model.train()
    model[0].eval()
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
