"""A scheduler that steps before the first update: the first value of its schedule is never used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[scheduler-before-optimizer] 'scheduler' (LinearLR) stepped 1 time before the first update of 'optimizer' (step 0)
  cause: scheduler.step() comes before optimizer.step(): the first value of the schedule is never used, and every \
update uses a later one
  fix: call scheduler.step() after optimizer.step()"""


def _case(scheduler_first: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _backward(setup, batch)
        if scheduler_first:
            setup.scheduler.step()
        setup.optimizer.step()
        if not scheduler_first:
            setup.scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _backward(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    for optimizer in setup.optimizers.values():
        optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    return loss


def buggy() -> dict[str, Any]:
    return _case(scheduler_first=True)


def healthy() -> dict[str, Any]:
    return _case(scheduler_first=False)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "stepped at the start of the next step": _with(_stepped_next),
        "a rate that is set by hand before each update": _with(_asked_first, lambda o: _Noam(o)),
        "a plateau that gets a metric before training": _with(_plateau, lambda o: lr_scheduler.ReduceLROnPlateau(o)),
        "one call for each micro-batch": _with(_each_micro_batch),
        "two optimizers, one schedule each": _two_optimizers(),
        "a GradScaler that skips the first update": _scaled(),
        "one call an epoch": _with(_each_epoch),
        "restarts in fractions of an epoch": _with(
            _fractions, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)
        ),
    }


class _Noam:
    """Sets the rate of the update that follows, as in the Transformer's reference code."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num = optimizer, 0

    def step(self) -> None:
        self.num += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.num**-0.5, self.num * 4**-1.5)


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _with(step: Any, make: Any = _halving) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, make(optimizer))

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _stepped_next(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    if setup.step_index:
        setup.scheduler.step()
    loss = _backward(setup, batch)
    setup.optimizer.step()
    return loss


def _asked_first(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _backward(setup, batch)
    setup.scheduler.step()
    setup.optimizer.step()
    return loss


def _plateau(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _backward(setup, batch)
    setup.scheduler.step(float(loss))
    setup.optimizer.step()
    return loss


def _each_micro_batch(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = (setup.model(batch[0]) - batch[1]).square().mean() / 2
    loss.backward()
    if setup.step_index % 2:
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    setup.scheduler.step()
    return loss


def _each_epoch(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    if setup.step_index and setup.step_index % 4 == 0:
        setup.scheduler.step()
    loss = _backward(setup, batch)
    setup.optimizer.step()
    return loss


def _fractions(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _backward(setup, batch)
    setup.optimizer.step()
    setup.scheduler.step((setup.step_index + 1) / 4)
    return loss


def _two_optimizers() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = {
            "body": torch.optim.AdamW(model[0].parameters(), lr=0.01),
            "head": torch.optim.SGD(model[2].parameters(), lr=0.1),
        }
        schedulers = {
            name: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            for name, optimizer in optimizers.items()
        }
        return TrainingSetup(model, optimizers, schedulers)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _backward(setup, batch)
        for name in setup.optimizers:  # the body's scheduler steps before the head's optimizer
            setup.optimizers[name].step()
            setup.schedulers[name].step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _scaled() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.01)
        return TrainingSetup(model, optimizer, _halving(optimizer), scaler=scaler)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        setup.scaler.scale(loss * 40.0).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        setup.scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 20}
