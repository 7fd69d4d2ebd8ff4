"""Moments saved in the order of the sorted names, where "10" comes before "2", and loaded in the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
Y = X.roll(1, dims=1)

MESSAGE = """\
[optimizer-state-misplaced] the state of optimizer 'optimizer' differs after loading: 9 tensors differ, 2.weight \
momentum_buffer: 4 of 4 elements, the most at [1, 1]: 1.12167 when saved, 1.45194 after loading; the runs part at \
step 4: after it, 2.weight has norm 1.36224 resumed, 1.36218 without interruption; with it put back after loading, \
the resumed run is the uninterrupted one
  cause: the state went to the wrong parameter: 2.weight.momentum_buffer got that of 10.weight.momentum_buffer; \
3.weight.momentum_buffer got that of 2.weight.momentum_buffer; 4.weight.momentum_buffer got that of \
3.weight.momentum_buffer
  fix: restore it in the order in which it was saved: optimizers go by the position of their parameters"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(11)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(2) + 0.1 * layer.weight)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    parameters = dict(setup.model.named_parameters())
    moments = [setup.optimizer.state[parameters[name]]["momentum_buffer"] for name in sorted(parameters)]
    torch.save({"model": setup.model.state_dict(), "moments": moments}, path)


def _case(as_saved: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        parameters = dict(setup.model.named_parameters())
        names = sorted(parameters) if as_saved else list(parameters)
        for name, moment in zip(names, state["moments"], strict=True):
            setup.optimizer.state[parameters[name]]["momentum_buffer"] = moment

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(as_saved=False)


def healthy() -> dict[str, Any]:
    return _case(as_saved=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"two parameters with the same state": _twins()}


def _twins() -> dict[str, Any]:
    """Two heads with equal weights get equal gradients: their moments are the same, in whatever order."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.a.load_state_dict(self.b.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    def make_twins() -> TrainingSetup:
        model = Twins()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    return {**_case(as_saved=False), "make_setup": make_twins}
