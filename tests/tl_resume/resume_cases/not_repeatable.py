"""A loop that differs a little from itself: each setup that is built gets a slightly other learning rate."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[not-repeatable] two runs from the same seed differ by 0.002 (relative) without any resume: differences count above \
0.0059 (relative) instead of 1e-05
  cause: something in the loop is not seeded (os.urandom, the time, an unseeded generator) or not deterministic
  fix: seed it, or use torch.use_deterministic_algorithms(True) for the check"""


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(jitter: float) -> dict[str, Any]:
    built = itertools.count()

    def make_setup() -> TrainingSetup:
        model = nn.Linear(4, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05 * (1 + jitter * next(built))))

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn}


def buggy() -> dict[str, Any]:
    return _case(jitter=1e-3)


def healthy() -> dict[str, Any]:
    return _case(jitter=0.0)


def near_misses() -> dict[str, dict[str, Any]]:
    def diverging(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * float("nan")

    return {"losses that are NaN in both runs": {**_case(jitter=0.0), "loss_fn": diverging}}
