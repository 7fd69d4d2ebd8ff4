"""The micro-batches that are left over when an epoch ends train nothing."""

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
    "cleared when the next epoch begins": """\
Gradient accumulation: failed, 1 finding

[last-group-dropped] the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) led to no \
step of optimizer 'optimizer': their gradients were gone when the next epoch began
  cause: the step updates after each 4th micro-batch only, and something clears the gradients between the epochs: 2 \
micro-batches an epoch train nothing
  fix: step after the last micro-batch of an epoch too, and divide its losses by the size of its group: `(i + 1) % k \
== 0 or i + 1 == 10`, where i counts the micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward
        full batch   backward, optimizer step, zero grad""",
    "a loader's length": """\
Gradient accumulation: failed, 1 finding

[last-group-dropped] the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) led to no \
step of optimizer 'optimizer': their gradients were gone when the next epoch began
  cause: the step updates after each 4th micro-batch only, and something clears the gradients between the epochs: 2 \
micro-batches an epoch train nothing
  fix: step after the last micro-batch of an epoch too, and divide its losses by the size of its group: `(i + 1) % k \
== 0 or i + 1 == 10`, where i counts the micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward
        full batch   backward, optimizer step, zero grad""",
}


def _case(*, step_at_end: bool, clear_at_start: bool = True, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        epoch = EPOCH if k > 1 else 1

        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % epoch
            size = min(k, epoch - place // k * k) if step_at_end else k
            if place == 0 and clear_at_start:
                setup.optimizer.zero_grad()
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
        "cleared when the next epoch begins": _case(step_at_end=False),
        "a loader's length": _case(step_at_end=False, data=Loader(), epoch_length=None),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "cleared when the next epoch begins": _case(step_at_end=True),
        "a loader's length": _case(step_at_end=True, data=Loader(), epoch_length=None),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "epochs of whole groups": _case(step_at_end=False, epoch_length=20),
        "no epoch ends within the run": _case(step_at_end=False, epoch_length=None, cycles=2),
        "an incomplete group that is stepped, nothing cleared": _case(step_at_end=True, clear_at_start=False),
    }
