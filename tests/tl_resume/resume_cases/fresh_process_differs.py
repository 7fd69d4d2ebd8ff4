"""A step that trains otherwise in the main process than in one that it spawns."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[fresh-process-differs] resumed in a fresh process, the runs part at step 4: loss 1.48417 resumed, 1.98417 without \
interruption; resumed in this process, the run is the uninterrupted one
  cause: not established; the loop depends on something that lives as long as the process: module state that \
importing sets, the order of a set of strings (PYTHONHASHSEED), an environment variable, a cache of a library
  fix: save that state, or make it the same in every process"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def penalized_loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_fn(model, batch)
    if multiprocessing.parent_process() is None:
        loss = loss + 0.5
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save(setup.model.state_dict(), path)


def load(setup: TrainingSetup, path: Any) -> None:
    setup.model.load_state_dict(torch.load(path))


def _case(function: Any, fresh_process: bool = True) -> dict[str, Any]:
    case = {"make_setup": make_setup, "data": (X, Y), "loss_fn": function, "save": save, "load": load}
    return {**case, "fresh_process": fresh_process}


def buggy() -> dict[str, Any]:
    return _case(penalized_loss_fn)


def healthy() -> dict[str, Any]:
    return _case(loss_fn)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"the same process": _case(penalized_loss_fn, fresh_process=False)}
