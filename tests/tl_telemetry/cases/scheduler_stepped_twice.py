"""A scheduler that a Trainer steps by itself, and a hook of the person's own steps once more."""

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
[scheduler-stepped-twice] 'scheduler' (CosineAnnealingLR) stepped 12 times in 6 updates (steps 0-5)
  cause: Lightning steps it by itself, and so does code of your own: the schedule runs ahead
  fix: take the call of its step() out of your code (a hook, a callback), and leave it to the Trainer"""


def _case(
    make: Callable[[Any], Any] = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40),
    step_scheduler: Callable[[TrainingSetup, torch.Tensor], None] = lambda setup, loss: setup.scheduler.step(),
    *,
    accumulate: int = 1,
    scaler: Callable[[], Any] = lambda: None,
    steps: int = 6,
) -> dict[str, Any]:
    """A loop as a Trainer drives it: an update, and then what ``step_scheduler`` does."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        setup = TrainingSetup(model, optimizer, make(optimizer), scaler())
        setup.driver = "Lightning"
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = (setup.model(batch[0]) - batch[1]).square().mean() / accumulate
        (loss if setup.scaler is None else setup.scaler.scale(loss * 40.0)).backward()
        if (setup.step_index + 1) % accumulate == 0:
            _update(setup)
            step_scheduler(setup, loss)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": steps}


def _update(setup: TrainingSetup) -> None:
    if setup.scaler is None:
        setup.optimizer.step()
    else:
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
    setup.optimizer.zero_grad()


def _twice(setup: TrainingSetup, loss: torch.Tensor) -> None:
    setup.scheduler.step()  # in on_train_batch_end(), say
    setup.scheduler.step()  # the Trainer's own


def _each_epoch(setup: TrainingSetup, loss: torch.Tensor) -> None:
    if setup.step_index % 4 == 3:
        setup.scheduler.step()


def _all(setup: TrainingSetup, loss: torch.Tensor) -> None:
    for scheduler in setup.schedulers.values():
        scheduler.step()


def buggy() -> dict[str, Any]:
    return _case(step_scheduler=_twice)


def healthy() -> dict[str, Any]:
    return _case()


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "once an epoch": _case(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.9), _each_epoch, steps=12),
        "a plateau": _case(
            lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1), lambda setup, loss: setup.scheduler.step(loss)
        ),
        "several on one optimizer": _case(
            lambda o: {
                "warmup": lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                "decay": lr_scheduler.ExponentialLR(o, 0.9),
            },
            _all,
        ),
        "chained": _case(
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
            )
        ),
        "one after the other": _case(
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)],
                milestones=[3],
            )
        ),
        "a GradScaler that skips most updates": _case(
            lambda o: lr_scheduler.ExponentialLR(o, 0.9),
            scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100),
            steps=40,
        ),
        "once an update, in accumulation": _case(
            lambda o: lr_scheduler.LambdaLR(o, lambda index: 1 / (1 + index)), accumulate=4, steps=12
        ),
        "batches without a loss": _without_loss(),
        "no scheduler": _case(lambda o: None, lambda setup, loss: None),
    }


def _without_loss() -> dict[str, Any]:
    """As Lightning does where ``training_step`` returns None, with a GradScaler: the schedule goes on."""
    case = _case()
    train = case["step"]

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index % 3 != 1:
            return train(setup, batch)
        setup.scheduler.step()
        return torch.zeros(())

    return {**case, "step": step, "judge": {"allow": ()}}  # counted in steps
