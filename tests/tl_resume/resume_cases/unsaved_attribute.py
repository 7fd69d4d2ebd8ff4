"""A count of examples that no checkpoint carries: without effect, and worth knowing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[unsaved-attribute] not restored, and no effect of it was seen in 8 steps: setup.num_examples 32 when saved, 0 after \
loading
  cause: left open; a history or a counter for output may start anew, what training comes to use may not
  fix: save it if training uses it"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    setup.num_examples = 0
    return setup


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _train(setup, batch)
    setup.num_examples += len(batch[0])
    return loss


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "num_examples": setup.num_examples}, path)


def _case(with_count: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_count:
            setup.num_examples = state["num_examples"]

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_count=False)


def healthy() -> dict[str, Any]:
    return _case(with_count=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def last_only(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _train(setup, batch)
        setup.num_examples = len(batch[0])
        return loss

    return {"a value that is the same after one step": {**_case(with_count=False), "step": last_only}}
