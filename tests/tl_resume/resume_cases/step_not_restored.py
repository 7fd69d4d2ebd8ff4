"""A load that does not say where to go on, in a loop that asks it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[step-not-restored] load() left setup.step_index at 0, and the run that saved had 4 steps behind it: the run would \
start again from step 0, its schedule and its data with it
  cause: the step to go on from is not in the checkpoint, or is counted otherwise
  fix: save setup.step_index (the number of steps that are done) and return it from load(), or set it there"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "step": setup.step_index}, path)


def _case(tells: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> int | None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        return state["step"] if tells else None

    return {
        "make_setup": make_setup,
        "data": (X, Y),
        "loss_fn": loss_fn,
        "save": save,
        "load": load,
        "restores_step": True,
    }


def buggy() -> dict[str, Any]:
    return _case(tells=False)


def healthy() -> dict[str, Any]:
    return _case(tells=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def sets_it(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.step_index = state["step"]

    return {
        "the setup's step is set": {**_case(tells=True), "load": sets_it},
        "nobody asks": {**_case(tells=False), "restores_step": False},
    }
