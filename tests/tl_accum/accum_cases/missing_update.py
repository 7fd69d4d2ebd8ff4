"""Cycles without an update that is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "counts to twice the number": """\
Gradient accumulation: failed, 1 finding

[missing-update] optimizer 'optimizer' made no update in cycle 1 of 2, but one with the full batch; it stepped after \
8 micro-batches instead
  cause: its condition counts to 8 instead of 4
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "one of two optimizers, every other cycle": """\
Gradient accumulation: failed, 1 finding

[missing-update] optimizer 'head' made no update in cycle 1 of 2, but one with the full batch; it stepped after 8 \
micro-batches instead
  cause: its condition counts to 8 instead of 4
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step 'body', zero grad
        full batch   backward, optimizer step 'body', zero grad, optimizer step 'head', zero grad""",
    "stops": """\
Gradient accumulation: failed, 1 finding

[missing-update] optimizer 'optimizer' made no update in cycle 2 of 2, but one with the full batch
  cause: undecided: its condition counts something else than micro-batches, or another condition keeps it from \
stepping
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "one step instead of two": """\
Gradient accumulation: failed, 1 finding

[missing-update] optimizer 'optimizer' made 1 update in cycle 1 of 2, and 2 with the full batch
  cause: it steps less often after a group than after a full batch: a loop or a condition around one of its steps \
depends on the accumulation steps
  fix: step as often after the last micro-batch of a group as after a full batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, optimizer step, zero grad""",
    "skipped by the scaler": """\
Gradient accumulation: failed, 1 finding

[missing-update] the GradScaler skipped the step of optimizer 'optimizer' in cycle 1 of 2, and not with the full \
batch: at a loss scale of 1.7e+38, the accumulated gradients hold Inf or NaN, and the full batch's do not
  cause: undecided: the accumulated gradients are larger than the full batch's (a loss that is not divided by the \
accumulation steps), or those of one micro-batch overflow
  fix: divide the loss by k before it is scaled; a smaller init_scale in the check lets the gradients be compared

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, unscale, skipped step, scaler update, zero grad
        full batch   backward, unscale, optimizer step, scaler update, zero grad""",
}


Due = Callable[[TrainingSetup, int], bool]


def _case(due: Due, *, head_due: Due | None = None, steps: int = 1, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        if head_due is None:
            return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        body, head = (torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 2))
        return TrainingSetup(model, {"body": body, "head": head})

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            for name, optimizer in setup.optimizers.items():
                condition = head_due if name == "head" and head_due is not None else due
                if condition(setup, k):
                    for _ in range(steps if k == 1 else 1):
                        optimizer.step()
                    optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step, **options}


def _scaled(divide: bool, init_scale: float) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            setup.scaler.scale(loss / k if divide else loss).backward()
            if _last(setup, k):
                setup.scaler.step(setup.optimizer)
                setup.scaler.update()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _last(setup: TrainingSetup, k: int) -> bool:
    return (setup.step_index + 1) % k == 0


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "counts to twice the number": _case(lambda setup, k: (setup.step_index + 1) % (k if k == 1 else 2 * k) == 0),
        "one of two optimizers, every other cycle": _case(
            _last, head_due=lambda setup, k: (setup.step_index + 1) % (k if k == 1 else 2 * k) == 0
        ),
        "stops": _case(lambda setup, k: _last(setup, k) and setup.step_index < 6),
        "one step instead of two": _case(_last, steps=2),
        "skipped by the scaler": _scaled(divide=False, init_scale=2.0**127),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "counts to twice the number": _case(lambda setup, k: (setup.step_index + 1) % k == 0),
        "one of two optimizers, every other cycle": _case(
            _last, head_due=lambda setup, k: (setup.step_index + 1) % k == 0
        ),
        "stops": _case(lambda setup, k: _last(setup, k) and setup.step_index < 8),
        "one step instead of two": _case(_last),
        "skipped by the scaler": _scaled(divide=True, init_scale=2.0**127),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "an optimizer that starts in the second cycle": _case(
            _last, head_due=lambda setup, k: _last(setup, k) and setup.step_index >= k, cycles=3
        ),
        "an optimizer with half the updates": _case(
            _last, head_due=lambda setup, k: (setup.step_index + 1) % (2 * k) == 0, cycles=4
        ),
        "one optimizer, with half the updates": _case(lambda setup, k: (setup.step_index + 1) % (2 * k) == 0, cycles=4),
        "a first step that the scaler skips, with the full batch too": {
            **_scaled(divide=True, init_scale=2.0**128 / 1.001),
            "cycles": 4,
        },
        "a cycle a call of the data": _case(_last, data=lambda cycle: (X + cycle, Y), cycles=3),
    }
