"""A checkpoint that is kept in memory, without copying what state_dict() refers to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[checkpoint-by-reference] 0.* (2 tensors), 2.* (2 tensors) differ after loading (0.weight: 32 of 32 elements, the \
most at [3, 3]: -0.456061 when saved, -0.920097 after loading); the state of optimizer 'optimizer' differs after \
loading: 3 tensors differ, 0.weight momentum_buffer: 32 of 32 elements, the most at [1, 2]: -0.0115082 when saved, \
2.67047 after loading; 2.bias momentum_buffer 5.55353 when saved, -0.713413 after loading; the runs part at step 4: \
loss 0.564332 resumed, 0.755326 without interruption; with the model's weights and the state of optimizer \
'optimizer' put back after loading, the resumed run is the uninterrupted one
  cause: the loaded values are those of the end of the run that saved: the checkpoint refers to the live tensors, \
which training went on to change (state_dict() does not copy)
  fix: write the file before save() returns, or copy: copy.deepcopy(model.state_dict()), tensor.detach().clone()"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(copied: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}

    def save(setup: TrainingSetup, path: Any) -> None:
        state = {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}
        kept[str(path)] = copy.deepcopy(state) if copied else state

    def load(setup: TrainingSetup, path: Any) -> None:
        setup.model.load_state_dict(kept[str(path)]["model"])
        setup.optimizer.load_state_dict(copy.deepcopy(kept[str(path)]["optimizer"]))

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(copied=False)


def healthy() -> dict[str, Any]:
    return _case(copied=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a reference, written before save returns": _written_at_once(),
        "weights that training no longer changes": _finished(),
    }


def _written_at_once() -> dict[str, Any]:
    pending: dict[str, Any] = {}

    def save(setup: TrainingSetup, path: Any) -> None:
        pending.update(model=setup.model.state_dict(), optimizer=setup.optimizer.state_dict())
        torch.save(pending, path)

    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.optimizer.load_state_dict(state["optimizer"])

    return {**_case(copied=True), "save": save, "load": load}


def _finished() -> dict[str, Any]:
    """The learning rate is 0 from the middle on: the weights at the end are those when saved."""

    def make_cooled() -> TrainingSetup:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainingSetup(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.0))

    return {"make_setup": make_cooled, "data": (X, Y), "loss_fn": loss_fn}
