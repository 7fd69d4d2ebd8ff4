"""A load that evaluates, and leaves the model in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import load_training_state, save_training_state

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[modes-not-restored] the model and 3 of its modules are in eval mode after loading, other than when saved; the runs \
part at step 4: loss 1.41433 resumed, 0.374959 without interruption; with it put back after loading, the resumed run \
is the uninterrupted one
  cause: load() gave them other values than when saved: dropout and batch norm act otherwise
  fix: save and restore module.training of each module, or call model.train() at the end of load()"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(back_to_training: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        load_training_state(setup, path)
        setup.model.eval()
        assert torch.isfinite(setup.model(X)).all()
        if back_to_training:
            setup.model.train()

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save_training_state, "load": load}


def buggy() -> dict[str, Any]:
    return _case(back_to_training=False)


def healthy() -> dict[str, Any]:
    return _case(back_to_training=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def sets_modes_itself(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.model.train()
        return step(setup, batch)

    return {
        "a step that begins with model.train()": {**_case(back_to_training=False), "step": sets_modes_itself},
        "a frozen part that stays in eval mode": _frozen(),
    }


def _frozen() -> dict[str, Any]:
    def make_frozen() -> TrainingSetup:
        setup = make_setup()
        setup.model[1].eval()
        return setup

    def load(setup: TrainingSetup, path: Any) -> None:
        load_training_state(setup, path)
        setup.model.train()
        setup.model[1].eval()

    return {**_case(back_to_training=True), "make_setup": make_frozen, "load": load}
