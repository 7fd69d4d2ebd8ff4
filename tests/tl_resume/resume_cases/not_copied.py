"""A loop that draws from a generator function: it is compared by what it gave only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1))

MESSAGE = """\
[not-copied] could not be compared or put back: setup.batches (a generator); only the batches that it gave were \
compared
  cause: a generator, or an iterator of a DataLoader, has no state that can be read or copied"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def step(setup: TrainingSetup, _: Any) -> torch.Tensor:
    x = next(setup.batches)
    loss = nn.functional.mse_loss(setup.model(x), x.sum(dim=1, keepdim=True))
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "step": setup.step_index}, path)


def _from(first: int) -> Iterator[torch.Tensor]:
    yield from X[first:]


def _case(copied: bool) -> dict[str, Any]:
    def batches(first: int) -> Iterator[torch.Tensor]:
        return iter(list(X[first:])) if copied else _from(first)

    def make_drawing() -> TrainingSetup:
        setup = make_setup()
        setup.batches = batches(0)
        return setup

    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.batches = batches(state["step"])

    return {"make_setup": make_drawing, "data": torch.zeros(1), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(copied=False)


def healthy() -> dict[str, Any]:
    return _case(copied=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def local(setup: TrainingSetup, _: Any) -> torch.Tensor:
        setup.batches = None
        x = next(_from(setup.step_index))
        loss = nn.functional.mse_loss(setup.model(x), x.sum(dim=1, keepdim=True))
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"a generator function that lives in one step": {**_case(copied=False), "step": local}}
