"""The optimizer's state is restored, and its groups keep the learning rate they were built with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[param-groups-not-restored] the param_groups of optimizer 'optimizer' differ after loading: group 0 lr 0.01 when \
saved, 0.1 after loading; the runs part at step 4: after it, weight has norm 2.42919 resumed, 1.86897 without \
interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: load() left them as make_setup() had built them: learning rate, weight decay and what else a loop changes \
on the way restart
  fix: load the whole optimizer.state_dict(), its param_groups included, and change nothing after it"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = loss_fn(setup.model, batch)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    if setup.step_index == 2:
        setup.optimizer.param_groups[0]["lr"] = 0.01
    return train(setup, batch)


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}, path)


def _case(with_groups: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if not with_groups:
            state["optimizer"]["param_groups"] = setup.optimizer.state_dict()["param_groups"]
        setup.optimizer.load_state_dict(state["optimizer"])

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_groups=False)


def healthy() -> dict[str, Any]:
    return _case(with_groups=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def sets_lr_itself(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.param_groups[0]["lr"] = 0.1 / (1 + setup.step_index)
        return train(setup, batch)

    return {
        "a loop that sets the learning rate in every step": {**_case(with_groups=False), "step": sets_lr_itself},
        "groups that never change": {**_case(with_groups=False), "step": train},
    }
