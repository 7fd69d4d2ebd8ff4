"""A learning rate of 0 throughout: here a warmup whose integer division gives 0 until it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[lr-zero] the learning rate of 'optimizer' was 0 in all of its 8 updates (steps 0-7)
  cause: its base rate is 0.1, but every value of 'scheduler' that was used is 0. Undecided which: an integer \
division (`step // warmup` for `step / warmup`), a warmup that counts epochs but is stepped once an update (or the \
reverse), or a schedule that stays at 0 for longer than the run
  fix: print the schedule's first values; a warmup from 0 must leave 0 at its first step"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    for scheduler in setup.schedulers.values():
        scheduler.step()
    return loss


def _scheduled(factor: Callable[[int], float]) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, lr_scheduler.LambdaLR(optimizer, factor))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 8}


def buggy() -> dict[str, Any]:
    return _scheduled(lambda step: step // 10)


def healthy() -> dict[str, Any]:
    return _scheduled(lambda step: step / 10)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "decay to exactly 0": _scheduled(lambda step: max(0.0, 1.0 - step / 4)),
        "warmup that holds 0 for a while": _scheduled(lambda step: 0.0 if step < 5 else 1.0),
        "cyclic from 0": _with(lambda o: lr_scheduler.CyclicLR(o, 0.0, 0.1, step_size_up=2)),
        "cosine with restarts": _with(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)),
        "lr 0 in one of two groups": _one_group_at_zero(),
        "warmup per epoch from exactly 0": _warmup_per_epoch(),
        "learning rate as a tensor": _with(lambda o: _ByHand(o), lr=torch.tensor(0.0)),
        "a class of one's own that warms up": _with(lambda o: _ByHand(o), lr=0.0),
    }


def _with(make: Callable[[Any], Any], lr: Any = 0.1) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return TrainingSetup(model, optimizer, make(optimizer))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 8}


class _ByHand:
    """A schedule written by hand: from 0 up, in the groups themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0 + 0.01 * min(self.count, 5)


def _one_group_at_zero() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        return TrainingSetup(model, torch.optim.AdamW(groups, lr=0.01))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 8}


def _warmup_per_epoch() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 2)))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        if setup.step_index % 4 == 3:
            setup.scheduler.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}
