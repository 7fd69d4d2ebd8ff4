"""A loss that does not fall by as much as was asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[loss-not-decreasing] the loss went from 2.62 (mean of the first 2 steps) to 2.62 (of the last 2): a decrease of \
0.00299 %, a decrease of at least 20 % was expected
  cause: undecided: the loss alone does not say why; if the report has other findings, those are likelier reasons
  fix: run more steps, print run.table(), and check the learning rate, the data and the loss function"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(lr: float, wanted: float = 0.2, sign: float = 1.0) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _train(setup, batch)
        return loss - 10.0 if sign < 0 else loss

    judge = {"min_relative_decrease": wanted}
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8, "judge": judge}


def buggy() -> dict[str, Any]:
    return _case(lr=0.000001)


def healthy() -> dict[str, Any]:
    return _case(lr=0.1)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a loss below 0 that falls": _case(lr=0.1, wanted=0.1, sign=-1.0),
        "a decrease of exactly 0 is enough": _case(lr=1e-6, wanted=0.0),
    }
