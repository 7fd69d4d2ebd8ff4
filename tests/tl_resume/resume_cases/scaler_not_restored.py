"""A GradScaler that is not in the checkpoint: scale and growth counter start again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[scaler-not-restored] the GradScaler differs after loading: scale 2048 when saved, 1024 after loading; \
_growth_tracker 1 when saved, 0 after loading; the losses agree so far
  cause: load() left it as make_setup() had built it: the loss scale and its growth counter restart
  fix: save scaler.state_dict() and load it with scaler.load_state_dict()"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), scaler=scaler)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "scaler": setup.scaler.state_dict()}, path)


def _case(with_scaler: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_scaler:
            setup.scaler.load_state_dict(state["scaler"])

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(with_scaler=False)


def healthy() -> dict[str, Any]:
    return _case(with_scaler=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"a scaler that is switched off": _disabled()}


def _disabled() -> dict[str, Any]:
    def make_disabled() -> TrainingSetup:
        setup = make_setup()
        setup.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return setup

    return {**_case(with_scaler=False), "make_setup": make_disabled}
