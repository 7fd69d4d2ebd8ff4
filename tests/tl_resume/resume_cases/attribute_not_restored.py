"""A patience that starts again: the count of bad steps is a plain attribute of the setup."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[attribute-not-restored] setup.bad_steps 4 when saved, 0 after loading; still different at the end of the run; the \
loop decides by it (attribute_not_restored.py:32)
  cause: training changes it, and the checkpoint does not carry it; there was no effect on the losses yet
  fix: save setup.bad_steps in the checkpoint and set it again in load()"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    setup.bad_steps = 0
    return setup


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _train(setup, batch)
    setup.bad_steps += 1 if loss > 0.01 else 0
    if setup.bad_steps > 100:
        raise StopIteration
    return loss


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "bad_steps": setup.bad_steps}, path)


def _case(with_count: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_count:
            setup.bad_steps = state["bad_steps"]

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_count=False)


def healthy() -> dict[str, Any]:
    return _case(with_count=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def recomputed(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.bad_steps = setup.step_index // 2
        return _train(setup, batch) * (1.0 if setup.bad_steps < 100 else 0.0)

    def only_counted(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.bad_steps += 1
        return _train(setup, batch)

    def cached(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if getattr(setup, "mean", None) is None:
            setup.mean = batch[1].mean()
        return _train(setup, (batch[0], batch[1] - setup.mean))

    def in_turns(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.bad_steps += 1  # 4 steps are behind the checkpoint: it begins anew where it was in its cycle
        return _train(setup, batch if setup.bad_steps % 2 else (-batch[0], -batch[1]))

    return {
        "a counter at the same place of its cycle": {**_case(with_count=False), "step": in_turns},
        "a value that each step computes anew": {**_case(with_count=False), "step": recomputed},
        "a number that is only counted": {**_case(with_count=False), "step": only_counted},
        "a cache that fills itself": {**_case(with_count=False), "step": cached},
    }
