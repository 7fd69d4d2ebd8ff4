"""The gradients that are left over when an epoch ends reach the next epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

EPOCH = 10  # micro-batches

MESSAGES = {
    "on top of the next group": """\
Gradient accumulation: failed, 1 finding

[last-group-leaks] the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) led to no \
step of optimizer 'optimizer': their gradients (norm 0.49) leaked into the next epoch's first update, on top of its \
own 4 micro-batches
  cause: the step updates after each 4th micro-batch only, and the gradients that remain are neither applied nor \
cleared at the end of the epoch
  fix: step after the last micro-batch of an epoch too, and divide its losses by the size of its group: `(i + 1) % k \
== 0 or i + 1 == 10`, where i counts the micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward
        full batch   backward, optimizer step, zero grad""",
    "as a part of the next group": """\
Gradient accumulation: failed, 1 finding

[last-group-leaks] the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) led to no \
step of optimizer 'optimizer': their gradients (norm 0.49) went into the next epoch's first update together with 2 \
micro-batches of it
  cause: the step updates after each 4th micro-batch only, and the gradients that remain are neither applied nor \
cleared at the end of the epoch
  fix: step after the last micro-batch of an epoch too, and divide its losses by the size of its group: `(i + 1) % k \
== 0 or i + 1 == 10`, where i counts the micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward
        full batch   backward, optimizer step, zero grad""",
}


def _case(*, step_at_end: bool, by_epoch: bool = True, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        epoch = EPOCH if k > 1 else 1

        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % epoch if by_epoch else setup.step_index
            size = min(k, epoch - place // k * k) if step_at_end else k
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / size).backward()
            if (place + 1) % k == 0 or (step_at_end and place + 1 == epoch):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step, "epoch_length": EPOCH} | options


class Loader:
    """A loader of ten micro-batches: here it gives full batches."""

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Any:
        return iter([(X, Y)] * EPOCH)


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "on top of the next group": _case(step_at_end=False),
        "as a part of the next group": _case(step_at_end=False, by_epoch=False),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "on top of the next group": _case(step_at_end=True),
        "as a part of the next group": _case(step_at_end=True, by_epoch=True),
    }


NOTED = {"a loader's length, and groups that go on through epochs": ("carried-over",)}


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a loader's length, and groups that go on through epochs": _case(
            step_at_end=False, by_epoch=False, data=Loader(), epoch_length=None
        ),
        "epochs of whole groups": _case(step_at_end=False, epoch_length=12),
    }
