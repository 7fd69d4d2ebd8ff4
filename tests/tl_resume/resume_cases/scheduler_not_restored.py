"""A warmup that starts again: the scheduler is saved and not loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[scheduler-not-restored] scheduler 'scheduler' differs after loading: last_epoch 4 when saved, 0 after loading; \
_step_count 5 when saved, 1 after loading; _last_lr[0] 0.05 when saved, 0.01 after loading; the runs part at step 5: \
after it, weight has norm 0.775521 resumed, 0.909097 without interruption; with it put back after loading, the \
resumed run is the uninterrupted one
  cause: load() left it as make_setup() had built it: the schedule restarts
  fix: save scheduler.state_dict() and load it with scheduler.load_state_dict() after the optimizer's"""


def _warmup(done: int) -> float:
    return min(1.0, (done + 1) / 8)


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
    return TrainingSetup(model, optimizer, LambdaLR(optimizer, _warmup))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({name: getattr(setup, name).state_dict() for name in ("model", "optimizer", "scheduler")}, path)


def _case(*names: str) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        for name in names:
            getattr(setup, name).load_state_dict(state[name])

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case("model", "optimizer")


def healthy() -> dict[str, Any]:
    return _case("model", "optimizer", "scheduler")


def near_misses() -> dict[str, dict[str, Any]]:
    return {"a scheduler set from the step's index": _by_step(), "a scheduler built for the step": _rebuilt()}


def _rebuilt() -> dict[str, Any]:
    """The schedule is a function of the step: ``last_epoch`` says all, but for torch's count of calls."""

    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.optimizer.load_state_dict(state["optimizer"])
        done = setup.step_index
        setup.schedulers["scheduler"] = LambdaLR(setup.optimizer, _warmup, last_epoch=done - 1)

    return {**_case("model", "optimizer"), "load": load}


def _by_step() -> dict[str, Any]:
    """The scheduler is a function of the step: its own counter is set in every step."""

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.scheduler.last_epoch = setup.step_index - 1
        setup.optimizer.zero_grad()
        loss = loss_fn(setup.model, batch)
        loss.backward()
        setup.optimizer.step()
        setup.scheduler.step()
        return loss

    return {**_case("model", "optimizer"), "loss_fn": None, "step": step}
