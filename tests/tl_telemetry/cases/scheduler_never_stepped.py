"""A scheduler whose step() is never called: worth a note, as it may step once an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[scheduler-never-stepped] 'scheduler' (CosineAnnealingLR) never stepped in 6 updates: the learning rate stayed at 0.1
  cause: undecided: its step() is called once an epoch, and no epoch ended in these steps; or it is never called
  fix: nothing, if it steps once an epoch; else call its step() after optimizer.step(); assert_lr with the expected \
rate makes this a finding"""


def _case(call_it: bool, make: Any = lambda o: lr_scheduler.CosineAnnealingLR(o, 10)) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, make(optimizer))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        if call_it:
            arguments = (float(loss),) if isinstance(setup.scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            setup.scheduler.step(*arguments)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(call_it=False)


def healthy() -> dict[str, Any]:
    return _case(call_it=True)


class _CountsElsewhere:
    """Keeps its counter where no observer looks for it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, {"count": 0}

    def step(self) -> None:
        self.state["count"] += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.state["count"])


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a plateau": _case(True, lr_scheduler.ReduceLROnPlateau),
        "one cycle": _case(True, lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20)),
        "one after the other": _case(True, _sequential),
        "chained": _case(True, _chained),
        "a class of one's own that counts elsewhere": _case(True, _CountsElsewhere),
        "a schedule that is flat here": _case(True, lambda o: lr_scheduler.StepLR(o, 100)),
    }


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )
