"""Dropout goes on with other random numbers: torch's generator is not in the checkpoint."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[rng-not-restored] torch's generator is in another state after loading than when saved, and the loop draws from it; \
the runs part at step 4: loss 1.69211 resumed, 0.855275 without interruption; with it put back after loading, the \
resumed run is the uninterrupted one
  cause: its random numbers (dropout, augmentation, shuffling) are other ones after resuming
  fix: save and restore it with torch.get_rng_state() and torch.set_rng_state(), or use save_training_state()"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def make_plain() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "rng": torch.get_rng_state()}, path)


def _case(with_rng: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_rng:
            torch.set_rng_state(state["rng"])

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_rng=False)


def healthy() -> dict[str, Any]:
    return _case(with_rng=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def seeded_by_step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        torch.manual_seed(1000 + setup.step_index)
        return _train(setup, batch)

    def draws_a_name(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.run_name = f"run-{random.random()}"
        return _train(setup, batch)

    return {
        "a loop that draws nothing": {**_case(with_rng=False), "make_setup": make_plain},
        "a loop that seeds itself in every step": {**_seeded(), "step": seeded_by_step},
        "numbers that touch nothing that is trained": {
            **_seeded(),
            "make_setup": make_plain,
            "step": draws_a_name,
        },
    }


def _seeded() -> dict[str, Any]:
    return {**_case(with_rng=False), "loss_fn": None}


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = loss_fn(setup.model, batch)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss
