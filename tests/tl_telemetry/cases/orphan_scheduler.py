"""A scheduler that goes on driving an optimizer which the loop has replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[orphan-scheduler] 'scheduler' (ExponentialLR) stepped 8 times, but the SGD that it drives is not in the setup any \
more, and stepped 2 times; the learning rate of 'optimizer' stayed at 0.05 in 6 updates
  cause: the optimizer that steps was built after the scheduler, which still holds the one before: nothing drives its \
rates
  fix: build the scheduler for the optimizer that steps, or change that one in place (add_param_group)"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    setup.schedulers["scheduler"].step()
    return loss


def _case(rebuild_scheduler: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)
        return TrainingSetup(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index == 2:
            setup.model.requires_grad_(True)
            setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.05)
            if rebuild_scheduler:
                setup.scheduler = lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
        return _train(setup, batch)

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def buggy() -> dict[str, Any]:
    return _case(rebuild_scheduler=False)


def healthy() -> dict[str, Any]:
    return _case(rebuild_scheduler=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "the base optimizer of a wrapper": _wrapped(),
        "an optimizer that the loop keeps to itself": _private(),
        "one optimizer a phase": _phases(),
        "a schedule that the loop copies to the rate": _clocked(to_rate=True),
        "a schedule of something else": _clocked(to_rate=False),
        "an old scheduler beside the one that drives": _both(),
    }


def _clocked(to_rate: bool) -> dict[str, Any]:
    """Let a scheduler count on an optimizer of its own, and copy its rate to the one that steps, or not."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        clock = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.05)
        return TrainingSetup(
            model, torch.optim.SGD(model.parameters(), lr=0.05), lr_scheduler.ExponentialLR(clock, 0.9)
        )

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _train(setup, batch)
        (rate,) = setup.scheduler.get_last_lr()
        if to_rate:
            setup.optimizer.param_groups[0]["lr"] = rate
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _both() -> dict[str, Any]:
    case = _case(rebuild_scheduler=False)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = case["step"](setup, batch)
        if setup.step_index == 2:
            setup.schedulers["new"] = lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
        elif setup.step_index > 2:
            setup.schedulers["new"].step()
        return loss

    return {**case, "step": step}


class _Ascending(torch.optim.Optimizer):
    """Wraps another optimizer, whose groups it shares by copies."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__([p for group in base.param_groups for p in group["params"]], {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        self.base.step()


def _wrapped() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        # the wrapper's own rate is never read
        wrapper = _Ascending(base)
        wrapper.param_groups[0]["lr"] = 0.05
        return TrainingSetup(model, wrapper, lr_scheduler.ExponentialLR(base, 0.9))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


def _private() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"a": nn.Linear(6, 1), "b": nn.Linear(6, 1)})
        setup = TrainingSetup(model, torch.optim.SGD(model["a"].parameters(), lr=0.05))
        setup.other = torch.optim.SGD(model["b"].parameters(), lr=0.05)
        setup.schedulers["other"] = lr_scheduler.ExponentialLR(setup.other, 0.9)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.model.zero_grad()
        loss = sum((part(batch[0]) - batch[1]).square().mean() for part in setup.model.values())
        loss.backward()
        setup.optimizer.step()
        setup.other.step()
        setup.schedulers["other"].step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _phases() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainingSetup(model, optimizer, {"first": lr_scheduler.ExponentialLR(optimizer, 0.9)})

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index == 4:
            setup.optimizer = torch.optim.Adam(setup.model.parameters(), lr=0.01)
            setup.schedulers["second"] = lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        setup.schedulers["first" if setup.step_index < 4 else "second"].step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}
