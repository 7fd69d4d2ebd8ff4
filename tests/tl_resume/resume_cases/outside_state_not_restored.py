"""A count of steps that the step keeps in a closure, and weighs the loss with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[outside-state-not-restored] seen (closure of step) 4 when saved, 0 after loading; the runs part at step 4: loss \
3.3604 resumed, 0.672081 without interruption; with it put back after loading, the resumed run is the uninterrupted \
one
  cause: training changes it, load() leaves it as it was built: it lies in a place outside of the setup, which no \
state_dict() covers
  fix: save seen in the checkpoint and set it in load(), or move it into the setup"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def _train(setup: TrainingSetup, batch: Any, weight: float) -> torch.Tensor:
    loss = weight * nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(with_seen: bool) -> dict[str, Any]:
    seen = 0

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return _train(setup, batch, weight=1.0 / seen)

    def save(setup: TrainingSetup, path: Any) -> None:
        torch.save({"model": setup.model.state_dict(), "seen": seen}, path)

    def load(setup: TrainingSetup, path: Any) -> None:
        nonlocal seen
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_seen:
            seen = state["seen"]

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_seen=False)


def healthy() -> dict[str, Any]:
    return _case(with_seen=True)


def near_misses() -> dict[str, dict[str, Any]]:
    memory: dict[str, torch.Tensor] = {}
    losses: list[float] = []

    def cached(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if "mean" not in memory:
            memory["mean"] = batch[0].mean()
        return _train(setup, (batch[0] - memory["mean"], batch[1]), weight=1.0)

    def history(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = _train(setup, batch, weight=1.0)
        losses.append(loss.item())
        return loss

    return {
        "a cache that fills itself": {**_case(with_seen=False), "step": cached},
        "a history of losses": {**_case(with_seen=False), "step": history},
    }
