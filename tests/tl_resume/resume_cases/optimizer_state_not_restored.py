"""Only the weights are saved; Adam's moments start again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[optimizer-state-not-restored] optimizer 'optimizer' has no state for 0.* (2 tensors), 2.* (2 tensors) after \
loading, and had it when saved; the runs part at step 4: after it, 0.weight has norm 1.56083 resumed, 1.55866 \
without interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: load() left it as make_setup() had built it: momentum, Adam's moments and step counts restart
  fix: save optimizer.state_dict() and load it with optimizer.load_state_dict(), once that is built"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.01))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}, path)


def _case(with_optimizer: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_optimizer:
            setup.optimizer.load_state_dict(state["optimizer"])

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_optimizer=False)


def healthy() -> dict[str, Any]:
    return _case(with_optimizer=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "an optimizer without state": _plain_sgd(),
        "an optimizer that starts afresh every second step": _restarted(),
    }


def _plain_sgd() -> dict[str, Any]:
    def make_plain() -> TrainingSetup:
        model = nn.Linear(4, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return {**_case(with_optimizer=False), "make_setup": make_plain}


def _restarted() -> dict[str, Any]:
    """Moments are cleared at each cycle's start, and the resume is at one."""

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index % 2 == 0:
            setup.optimizer.state.clear()
        loss = loss_fn(setup.model, batch)
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {**_case(with_optimizer=False), "loss_fn": None, "step": step}
