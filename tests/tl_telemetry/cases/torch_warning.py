"""What torch warns of during a run is worth a note."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[torch-warning] torch warned at torch_warning.py:38 (steps 0-5): UserWarning: Implicit dimension choice for \
log_softmax has been deprecated. Change the call to include dim=X as an argument."""


def _case(make_loss: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 3)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = make_loss(setup.model(batch[0]))
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(lambda made: -F.log_softmax(made)[:, 0].mean())


def healthy() -> dict[str, Any]:
    return _case(lambda made: -F.log_softmax(made, dim=1)[:, 0].mean())


def near_misses() -> dict[str, dict[str, Any]]:
    return {"a warning of the person's own": _case(_warns)}


def _warns(made: torch.Tensor) -> torch.Tensor:
    warnings.warn("the data set is small", stacklevel=1)
    return made.square().mean()
