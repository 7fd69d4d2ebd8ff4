"""State beside the weights that never changes: worth a note."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[static-state] setup.state['meter'] (_Meter) never changed in 6 updates, and no forward pass used it
  cause: undecided: it is constant, or changes later (a best score, an average of the last epochs), or its update is \
never called
  fix: nothing, if it is meant to stay"""


class _Meter:
    """The mean of what it was given."""

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(()), 0

    def add(self, loss: torch.Tensor) -> None:
        self.sum, self.count = self.sum + loss.detach(), self.count + 1

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}


def _case(add: bool, **state: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainingSetup(model, optimizer, state={"meter": _Meter(), **state})

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        if add:
            setup.state["meter"].add(loss)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(add=False)


def healthy() -> dict[str, Any]:
    return _case(add=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "values without a state_dict": _case(add=True, seed=3, names=("a", "b")),
        "a module without tensors": _case(add=True, loss=nn.MSELoss()),
    }
