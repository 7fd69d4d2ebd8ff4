"""A cosine schedule as long as there are epochs, stepped in every batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup
from tl_telemetry import num_updates

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)
UPDATES = num_updates(num_examples=64, batch_size=8, epochs=5)

MESSAGE = """\
[schedule-horizon] 'scheduler' (CosineAnnealingLR, T_max=5) is over after 5 steps of its own, and makes 40 in the 40 \
updates of 'optimizer': from its step 6 on the rate rises again
  cause: undecided: its length counts something else than its steps (epochs, micro-batches, updates), or is that of \
a longer or shorter training
  fix: give it the number of steps that it makes, 40, or step it as often as its length says; nothing, if it is meant"""


def case(
    make: Callable[[Any], Any],
    *,
    planned: Any = UPDATES,
    every: int = 1,
    accumulation: int = 1,
    steps: int = 20,
    first: bool = False,
) -> dict[str, Any]:
    """A loop whose scheduler steps in every ``every``-th step; ``first``: before the optimizer."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return TrainingSetup(model, optimizer, make(optimizer))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = (setup.model(batch[0]) - batch[1]).square().mean() / accumulation
        loss.backward()
        if first:
            setup.scheduler.step()
        if (setup.step_index + 1) % accumulation == 0:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        if not first and (setup.step_index + 1) % every == 0:
            for scheduler in setup.schedulers.values():
                scheduler.step()
        return loss

    judge = {} if planned is None else {"num_updates": planned}
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": steps, "judge": judge}


def buggy() -> dict[str, Any]:
    return case(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5))


def healthy() -> dict[str, Any]:
    return case(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, UPDATES))


def near_misses() -> dict[str, dict[str, Any]]:
    cosine = lr_scheduler.CosineAnnealingLR
    warmup = partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=5)
    return {
        "nobody says how long the training is": case(lambda o: cosine(o, 5), planned=None),
        "the last update takes the last rate": case(lambda o: cosine(o, UPDATES - 1)),
        "once an epoch": case(lambda o: cosine(o, 5), every=8, planned=40),
        "once an epoch, in a whole run": case(lambda o: cosine(o, 2), every=10, planned=20),
        "accumulation": case(lambda o: cosine(o, 10), every=4, accumulation=4, planned=10),
        "a warmup that ends": case(warmup),
        "a warmup, then a cosine": case(
            lambda o: lr_scheduler.SequentialLR(o, [warmup(o), cosine(o, UPDATES - 5)], milestones=[5])
        ),
        "a warmup, then a schedule without an end": case(
            lambda o: lr_scheduler.SequentialLR(o, [warmup(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5])
        ),
        "a warmup beside a cosine": case(lambda o: lr_scheduler.ChainedScheduler([warmup(o), cosine(o, UPDATES)])),
        "warm restarts": case(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7)),
        "one cycle": case(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=UPDATES)),
        "a decay to the end": case(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=UPDATES)),
        "a polynomial": case(lambda o: lr_scheduler.PolynomialLR(o, UPDATES)),
        "a function of the planned steps": case(lambda o: lr_scheduler.LambdaLR(o, to_zero(UPDATES))),
        "a function of its own": case(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step)),
        "before the optimizer's step": case(
            lambda o: lr_scheduler.CosineAnnealingLR(o, UPDATES), first=True, accumulation=2, steps=40, planned=20
        )
        | {"judge": {"num_updates": 20, "allow": ["scheduler-before-optimizer"]}},
    }


def to_zero(num_training_steps: int) -> Callable[[int], float]:
    """A linear schedule as transformers builds it."""
    return partial(_to_zero, num_training_steps=num_training_steps)


def _to_zero(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1.0 - step / num_training_steps)
