"""A scheduler that steps in every micro-batch while the optimizer accumulates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[scheduler-too-often] 'scheduler' (CosineAnnealingLR) stepped 12 times in 3 updates of 'optimizer' (steps 0-11)
  cause: its step() is called in steps without an update too (9 of the calls): the schedule runs ahead, unless its \
length counts these steps (micro-batches, or another optimizer's updates)
  fix: call scheduler.step() once an update, or make the schedule's length count what it is called for"""


def _case(each_micro_batch: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 20))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = (setup.model(batch[0]) - batch[1]).square().mean() / 4
        loss.backward()
        if setup.step_index % 4 == 3:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        if each_micro_batch or setup.step_index % 4 == 3:
            setup.scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 12}


def buggy() -> dict[str, Any]:
    return _case(each_micro_batch=True)


def healthy() -> dict[str, Any]:
    return _case(each_micro_batch=False)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "restarts in fractions of an epoch": _with(
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3), lambda setup: ((setup.step_index + 1) / 3,)
        ),
        "a jump to a far epoch": _with(
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30), lambda setup: (setup.step_index * 10,)
        ),
        "two schedulers on one optimizer": _two_on_one(),
        "chained": _with(
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
            )
        ),
        "a GradScaler that skips most updates": _scaled(),
    }


def _with(make: Any, arguments: Any = lambda setup: ()) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, make(optimizer))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        for scheduler in setup.schedulers.values():
            scheduler.step(*arguments(setup))
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _two_on_one() -> dict[str, Any]:
    return _with(
        lambda o: {
            "warmup": lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            "decay": lr_scheduler.ExponentialLR(o, 0.9),
        }
    )


def _scaled() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.01)
        return TrainingSetup(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9), scaler=scaler)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        setup.scaler.scale(loss * 40.0).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        setup.scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 20}
