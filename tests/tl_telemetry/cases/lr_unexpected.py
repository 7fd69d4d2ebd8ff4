"""Learning rates that differ from the expected ones: here a scheduler that steps before the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[lr-unexpected] the learning rate of 'optimizer' (group 0) differs from the expected one in 3 of 6 steps (steps 0-2): \
in step 0 it was 0.05, 0.025 expected
  cause: the schedule runs 1 step ahead of the expectation: scheduler.step() is called before optimizer.step()
  fix: call scheduler.step() after optimizer.step()"""


def _expected(step: int) -> float:
    return 0.1 * min(1.0, (step + 1) / 4)


def _case(scheduler_first: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return TrainingSetup(model, optimizer, schedule)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        if scheduler_first:
            setup.scheduler.step()
        setup.optimizer.step()
        if not scheduler_first:
            setup.scheduler.step()
        return loss

    judge = lambda run: run.assert_lr(_expected)  # noqa: E731
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6, "judge": judge}


def buggy() -> dict[str, Any]:
    return _case(scheduler_first=True)


def healthy() -> dict[str, Any]:
    return _case(scheduler_first=False)


def near_misses() -> dict[str, dict[str, Any]]:
    case = healthy()
    return {
        "a list of rates": {**case, "judge": lambda run: run.assert_lr([_expected(step) for step in range(6)])},
        "rates to four digits": {
            **case,
            "judge": lambda run: run.assert_lr([0.025, 0.05001, 0.075, 0.1, 0.1, 0.1], rtol=1e-3),
        },
    }
