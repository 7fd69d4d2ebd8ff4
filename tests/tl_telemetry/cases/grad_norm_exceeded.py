"""Gradient norms beyond a bound that was asked for, hidden by a clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[grad-norm-exceeded] the gradient norm of 'optimizer' before clipping was beyond 10 in 6 of 6 updates (steps 0-5), \
the largest 360 in step 0; the clip to 1 hides it
  cause: undecided: targets or losses on an unusual scale, a learning rate that is too high, exploding activations, \
or a bound that is too low for this model
  fix: compare the norms with those of a run that trained well: then normalise the targets, lower the learning rate, \
or raise max_grad_norm"""


def _case(scale: float) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = scale * (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        return loss

    judge = {"max_grad_norm": 10.0}
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6, "judge": judge}


def buggy() -> dict[str, Any]:
    return _case(scale=100.0)


def healthy() -> dict[str, Any]:
    return _case(scale=1.0)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "large norms without a bound": {**_case(scale=100.0), "judge": {}},
        "scaled gradients": _scaled(),
        "a bound for each of two optimizers": _two_optimizers(),
    }


def _scaled() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss

    judge = {"max_grad_norm": 10.0}
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6, "judge": judge}


def _two_optimizers() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizers = {
            "weights": torch.optim.SGD([model.weight], lr=0.01),
            "biases": torch.optim.SGD([model.bias], lr=0.01),
        }
        return TrainingSetup(model, optimizers)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    judge = {"max_grad_norm": 3.6}
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6, "judge": judge}
