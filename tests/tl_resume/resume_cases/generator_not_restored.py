"""Noise from a generator of the loop's own, which nothing saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[generator-not-restored] the random generator setup.noise is in another state after loading than when saved, and the \
loop draws from it; the runs part at step 4: loss 1.30911 resumed, 1.38299 without interruption; with it put back \
after loading, the resumed run is the uninterrupted one
  cause: a generator of the loop's own is in no state_dict(): its state must be saved by hand
  fix: save setup.noise.get_state() and restore it with set_state() in load()"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    setup.noise = torch.Generator().manual_seed(7)
    return setup


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    noisy = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=setup.noise)
    return _train(setup, (noisy, batch[1]))


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "noise": setup.noise.get_state()}, path)


def _case(with_noise: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_noise:
            setup.noise.set_state(state["noise"])

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_noise=False)


def healthy() -> dict[str, Any]:
    return _case(with_noise=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def by_step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.noise.manual_seed(setup.step_index)
        return step(setup, batch)

    def for_a_plot(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.shown = int(torch.randint(8, (), generator=setup.noise))
        return _train(setup, batch)

    return {
        "a generator that is never used": {**_case(with_noise=False), "step": _train},
        "a generator that each step seeds": {**_case(with_noise=False), "step": by_step},
        "a generator that only picks what is shown": {**_case(with_noise=False), "step": for_a_plot},
    }
