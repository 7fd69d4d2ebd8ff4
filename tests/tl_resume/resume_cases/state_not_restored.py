"""An average of the weights that lies in setup.state and is not loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[state-not-restored] setup.state['average'] differs after loading: module.weight: 4 of 4 elements, the most at [0, \
1]: 0.466096 when saved, -0.220689 after loading; module.bias -0.401596 when saved, -0.470718 after loading; \
n_averaged 4 when saved, 0 after loading; the losses agree so far
  cause: load() left it as make_setup() had built it
  fix: save its state_dict() (or its content) and restore it in load()"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={"average": average})


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    setup.state["average"].update_parameters(setup.model)
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "average": setup.state["average"].state_dict()}, path)


def _case(with_average: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_average:
            setup.state["average"].load_state_dict(state["average"])

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_average=False)


def healthy() -> dict[str, Any]:
    return _case(with_average=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"a teacher that never changes": _teacher(), "an entry that each step computes anew": _recomputed()}


def _teacher() -> dict[str, Any]:
    def make_taught() -> TrainingSetup:
        setup = make_setup()
        teacher = nn.Linear(4, 1).requires_grad_(False)
        nn.init.constant_(teacher.weight, 0.5)
        nn.init.zeros_(teacher.bias)
        setup.state = {"teacher": teacher}
        return setup

    def learn(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(setup.model(batch[0]), setup.state["teacher"](batch[0]))
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {**_weights_only(), "make_setup": make_taught, "step": learn}


def _weights_only() -> dict[str, Any]:
    def save_weights(setup: TrainingSetup, path: Any) -> None:
        torch.save(setup.model.state_dict(), path)

    def load_weights(setup: TrainingSetup, path: Any) -> None:
        setup.model.load_state_dict(torch.load(path))

    return {**_case(with_average=False), "save": save_weights, "load": load_weights}


def _recomputed() -> dict[str, Any]:
    def make_noting() -> TrainingSetup:
        setup = make_setup()
        setup.state = {"last": {"loss": 0.0}}
        return setup

    def noting(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        setup.state["last"]["loss"] = loss.item()
        return loss

    return {**_weights_only(), "make_setup": make_noting, "step": noting}
