"""A make_setup that shuffles its parameters: Adam's state is restored by position."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[parameter-order-varies] make_setup() gives optimizer 'optimizer' its parameters in another order from call to call: \
place 0 holds 2.weight in the run that saves and 3.weight in another setup; the state of optimizer 'optimizer' \
differs after loading: 6 tensors differ, 2.weight exp_avg: 16 of 16 elements, the most at [3, 2]: -0.0917034 when \
saved, 0.0100175 after loading
  cause: optimizer.load_state_dict() goes by position, so that each parameter gets the state of another one; a set \
(or anything that is ordered by id or hash) makes such an order
  fix: build the parameter list in a fixed order: model.parameters(), or sorted by name"""


def _save(setup: TrainingSetup, path: Any) -> None:
    state = {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}
    torch.save(state, path)


def _load(setup: TrainingSetup, path: Any) -> None:
    state = torch.load(path)
    setup.model.load_state_dict(state["model"])
    setup.optimizer.load_state_dict(state["optimizer"])


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(in_order: bool, save: Any = _save, load: Any = _load) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)), nn.Linear(4, 1))
        layers = [layer.weight for layer in model[:4]]
        if not in_order:
            random.shuffle(layers)
        parameters = [*layers, *model[4].parameters()]
        return TrainingSetup(model, torch.optim.Adam(parameters, lr=0.01))

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": _loss, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(in_order=False)


def healthy() -> dict[str, Any]:
    return _case(in_order=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "the checkpoint goes by name": _case(in_order=False, save=None, load=None),
        "an optimizer without state": _without_state(),
    }


def _without_state() -> dict[str, Any]:
    case = _case(in_order=False)
    make_setup = case["make_setup"]

    def plain_sgd() -> TrainingSetup:
        setup = make_setup()
        parameters = setup.optimizer.param_groups[0]["params"]
        return TrainingSetup(setup.model, torch.optim.SGD(parameters, lr=0.01))

    return {**case, "make_setup": plain_sgd}
