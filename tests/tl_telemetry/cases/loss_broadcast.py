"""A loss between shapes that differ: every prediction is compared with every target."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[loss-broadcast] the loss at loss_broadcast.py:31 compares an input of size (16, 1) with a target of size (16,) \
(first in step 0): they are broadcast to (16, 16), and 256 pairs are compared instead of 16
  cause: the shapes differ, and are stretched to a common one instead of being compared element by element
  fix: give both the same shape: target.unsqueeze(-1), or prediction.squeeze(-1)"""


def _case(y: torch.Tensor, loss_fn: Any = F.mse_loss, squeeze: bool = False) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        made = setup.model(batch[0])
        loss = loss_fn(made.squeeze(1) if squeeze else made, batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(Y.squeeze(1))


def healthy() -> dict[str, Any]:
    return _case(Y)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "both without the last dimension": _case(Y.squeeze(1), squeeze=True),
        "a weighted loss": _case(Y, lambda made, y: F.mse_loss(made, y, reduction="none").mean(1).mul(0.5).mean()),
        "a broadcast that is written out": _case(Y, lambda made, y: (made - y.mean(0)).square().mean()),
    }
