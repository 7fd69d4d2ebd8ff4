"""Schedulers that step with another frequency than the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (CosineAnnealingLR) stepped 4 times in cycle 1 of 2, in micro-batches 1, 2, 3 \
and 4 of 4; with the full batch, it stepped once
  cause: scheduler.step() is called in every micro-batch: the schedule runs 4 times too fast
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, scheduler step
  1     2 of 4       backward, scheduler step
  2     3 of 4       backward, scheduler step
  3     4 of 4       backward, optimizer step, zero grad, scheduler step
        full batch   backward, optimizer step, zero grad, scheduler step""",
    "on a plateau, in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (ReduceLROnPlateau) stepped 4 times in cycle 1 of 2, in micro-batches 1, 2, 3 \
and 4 of 4; with the full batch, it stepped once
  cause: scheduler.step() is called in every micro-batch: its patience runs out 4 times too fast
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, scheduler step
  1     2 of 4       backward, scheduler step
  2     3 of 4       backward, scheduler step
  3     4 of 4       backward, optimizer step, zero grad, scheduler step
        full batch   backward, optimizer step, zero grad, scheduler step""",
    "every other micro-batch": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (CosineAnnealingLR) stepped twice in cycle 1 of 2, in micro-batches 2 and 4 \
of 4; with the full batch, it stepped once
  cause: scheduler.step() is called in micro-batches that make no update
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward, scheduler step
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad, scheduler step
        full batch   backward, optimizer step, zero grad, scheduler step""",
    "never with accumulation": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (CosineAnnealingLR) did not step in cycle 1 of 2; with the full batch, it \
stepped once
  cause: scheduler.step() is not reached in any of these micro-batches
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad, scheduler step""",
    "in the first cycle only": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (CosineAnnealingLR) did not step in cycle 2 of 2; with the full batch, it \
stepped once
  cause: scheduler.step() is not reached in any of these micro-batches
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad, scheduler step""",
    "twice": """\
Gradient accumulation: failed, 1 finding

[scheduler-steps] scheduler 'scheduler' (CosineAnnealingLR) stepped twice in cycle 1 of 2, in micro-batch 4 of 4; \
with the full batch, it stepped once
  cause: scheduler.step() is called more often after an update than with full batches
  fix: call scheduler.step() after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad, scheduler step
        full batch   backward, optimizer step, zero grad, scheduler step""",
}

Step = Callable[[TrainingSetup, Any], Any]


Due = Callable[[int, int], bool]


def _case(due: Due, *, kind: str = "cosine", times: int = 1, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "plateau":
            return TrainingSetup(model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        return TrainingSetup(model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=20))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if due(setup.step_index, k):
                for _ in range(times if k > 1 else 1):
                    setup.scheduler.step(*([loss.detach()] if kind == "plateau" else []))
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _last(index: int, k: int) -> bool:
    return (index + 1) % k == 0


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "in every micro-batch": _case(lambda index, k: True),
        "on a plateau, in every micro-batch": _case(lambda index, k: True, kind="plateau"),
        "every other micro-batch": _case(lambda index, k: (index + 1) % max(k // 2, 1) == 0),
        "never with accumulation": _case(lambda index, k: k == 1),
        "in the first cycle only": _case(lambda index, k: _last(index, k) and index < 4),
        "twice": _case(_last, times=2),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "in every micro-batch": _case(_last),
        "on a plateau, in every micro-batch": _case(_last, kind="plateau"),
        "every other micro-batch": _case(lambda index, k: (index + 1) % max(k, 1) == 0),
        "never with accumulation": _case(lambda index, k: k == 1 or index % k == k - 1),
        "in the first cycle only": _case(lambda index, k: _last(index, k) and index < 8),
        "twice": _case(_last, times=1),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def per_epoch(k: int) -> Step:
        epoch = 8 // (4 // k) if k > 1 else 2

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if _last(setup.step_index, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if (setup.step_index + 1) % epoch == 0:
                setup.scheduler.step()
            return loss

        return step

    def first(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if setup.step_index % k == 0 and setup.step_index:
                setup.scheduler.step()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if _last(setup.step_index, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    plain = _case(_last)
    return {
        "once an epoch of two cycles": plain | {"make_step": per_epoch, "cycles": 4},
        "when the next group begins": plain | {"make_step": first, "cycles": 3},
    }
