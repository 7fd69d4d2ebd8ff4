"""A backbone that is unfrozen at step 2 and frozen again after a resume: state_dict() carries no requires_grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[trainable-not-restored] 0.* (2 tensors) are frozen after loading (requires_grad=False), other than when saved; the \
runs part at step 4: after it, 0.weight has norm 1.63822 resumed, 1.68804 without interruption; with it put back \
after loading, the resumed run is the uninterrupted one
  cause: state_dict() carries values, not requires_grad: parameters are frozen or trained as in the beginning
  fix: freeze and unfreeze in load() as the run had done, for example from the restored step"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    if setup.step_index == 2:
        setup.model[0].requires_grad_(True)
    return _train(setup, batch)


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "step": setup.step_index}, path)


def _case(unfreeze: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if unfreeze:
            setup.model[0].requires_grad_(state["step"] >= 2)

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(unfreeze=False)


def healthy() -> dict[str, Any]:
    return _case(unfreeze=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def decides_in_every_step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.model[0].requires_grad_(setup.step_index >= 2)
        return _train(setup, batch)

    return {
        "a step that freezes and unfreezes itself": {**_case(unfreeze=False), "step": decides_in_every_step},
        "a backbone that stays frozen": {**_case(unfreeze=False), "step": _train},
    }
