"""A load that puts a new model into the setup, and leaves the optimizer with the parameters of the old one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[optimizer-of-other-model] after loading, 2 of 2 tensors in optimizer 'optimizer' are no longer in the setup (when \
saved, they were weight, bias): its steps go nowhere
  cause: load() put another model, or other tensors, into the setup, and the optimizer still holds the old ones
  fix: copy into the tensors that are there (model.load_state_dict(...), tensor.copy_(...)), or build the optimizer \
anew for the new ones and then load its state"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}, path)


def _case(into_what_is_there: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        if not into_what_is_there:
            setup.model = nn.Linear(4, 1)
        setup.model.load_state_dict(state["model"])
        setup.optimizer.load_state_dict(state["optimizer"])

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(into_what_is_there=False)


def healthy() -> dict[str, Any]:
    return _case(into_what_is_there=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def both_anew(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model = nn.Linear(4, 1)
        setup.model.load_state_dict(state["model"])
        setup.optimizers["optimizer"] = torch.optim.SGD(setup.model.parameters(), lr=0.05)
        setup.optimizer.load_state_dict(state["optimizer"])

    return {
        "model and optimizer built anew": {**_case(into_what_is_there=True), "load": both_anew},
        "a criterion in the same optimizer": _with_criterion(),
    }


def _with_criterion() -> dict[str, Any]:
    """The optimizer holds a tensor that is none of the model's, in every run."""

    def make_weighted() -> TrainingSetup:
        model = nn.Linear(4, 1)
        scale = nn.Parameter(torch.ones(1))
        setup = TrainingSetup(model, torch.optim.SGD([*model.parameters(), scale], lr=0.05))
        setup.state["scale"] = scale
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = loss_fn(setup.model, batch) * setup.state["scale"].sum() - setup.state["scale"].log().sum()
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        return loss

    def save_all(setup: TrainingSetup, path: Any) -> None:
        torch.save({"model": setup.model.state_dict(), "scale": setup.state["scale"].detach()}, path)

    def load_all(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        with torch.no_grad():
            setup.state["scale"].copy_(state["scale"])

    case = {"make_setup": make_weighted, "data": (X, Y), "step": step}
    return {**case, "save": save_all, "load": load_all}
