"""An optimizer that steps and changes nothing: a learning rate in the wrong unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[no-update] 'optimizer' stepped 6 times and changed no parameter (steps 0-5), with a gradient norm of 3.6 and a \
learning rate of 1e-12
  cause: undecided: the step is too small for the weights' precision (a learning rate in the wrong unit), or the \
step() of SGD does not write what it computes to the parameters
  fix: compare the learning rate with one that trained before; for an optimizer of your own, check that it writes to \
the parameters in place"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    for scheduler in setup.schedulers.values():
        scheduler.step()
    return loss


def _case(lr: float, **extra: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr), **extra)

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(lr=1e-12)


def healthy() -> dict[str, Any]:
    return _case(lr=1e-2)


class _DataSwapped(torch.optim.Optimizer):
    """Puts new tensors behind the parameters instead of writing into them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a warmup that begins too small to show": _warmup(),
        "parameters whose data is swapped": _swapped(),
        "a model at its optimum, with gradients of exactly 0": _at_optimum(),
        "a first update that only fills the optimizer's state": _late_first_update(),
    }


def _warmup() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0 ** min(0, 2 * step - 10))
        return TrainingSetup(model, optimizer, factor)

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


def _swapped() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, _DataSwapped(model.parameters(), lr=0.01))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


def _at_optimum() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        margin = 100.0 * setup.step_index  # from step 1 on, the hinge is satisfied everywhere
        loss = (1.0 - margin - setup.model(batch[0]).abs()).clamp(min=0.0).mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


class _LateStart(torch.optim.SGD):
    """Leaves the weights alone in its first update, as optimizers that estimate a curvature first do."""

    def step(self, closure: Any = None) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 1:
            super().step(closure)


def _late_first_update() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, _LateStart(model.parameters(), lr=0.01))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}
