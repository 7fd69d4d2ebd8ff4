"""Groups that go on through the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a loader of six batches": """\
Gradient accumulation: passed, 1 note

Notes:
[carried-over] the loader has 6 batches: the last 2 micro-batches of an epoch went into the next epoch's first \
update, which comes after every 4 micro-batches whatever their epoch
  fix: nothing, if that is meant; pass epoch_length=6 to demand an update at an epoch's end""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Loader:
    """A loader of some number of batches."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([(X, Y)] * self.length)


def _case(length: int, *, by_epoch: bool = False, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        epoch = length if k > 1 else 1

        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % epoch if by_epoch else setup.step_index
            size = min(k, epoch - place // k * k) if by_epoch else k
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / size).backward()
            if (place + 1) % k == 0 or (by_epoch and place + 1 == epoch):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": Loader(length), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {"a loader of six batches": _case(6)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"a loader of six batches": _case(6, by_epoch=True)}


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "whole groups": _case(8),
        "a list, which is no loader": _case(6, data=[(X, Y)] * 6),
        "a loader that is longer than a check feeds": _case(65),
    }
