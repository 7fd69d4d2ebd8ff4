"""A loop that differs so much from itself that a resume cannot be told from it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[not-judged] two runs from the same seed differ by 0.58 (relative) without any resume: so the resumed run cannot be \
judged by comparing it; the state after loading was judged
  cause: something in the loop is not seeded (os.urandom, the time, an unseeded generator) or not deterministic
  fix: seed it, or use torch.use_deterministic_algorithms(True) for the check"""


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(seeded: bool) -> dict[str, Any]:
    built = itertools.count()

    def make_setup() -> TrainingSetup:
        model = nn.Linear(4, 1)
        seed = 0 if seeded else next(built)
        with torch.no_grad():
            model.weight.fill_(0.25 + 0.25 * seed)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn}


def buggy() -> dict[str, Any]:
    return _case(seeded=False)


def healthy() -> dict[str, Any]:
    return _case(seeded=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def shown_noise(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.token = object()
        loss = loss_fn(setup.model, batch)
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"an object that is another one each time": {**_case(seeded=True), "loss_fn": None, "step": shown_noise}}
