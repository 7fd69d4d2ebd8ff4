"""Losses kept with their graphs, from step to step."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[graph-kept-alive] the autograd graphs of 8 of 8 steps were still alive when the run ended
  cause: losses, or what is computed from them, are kept with their history from step to step, so that memory grows \
with every step: usually a sum (`total += loss`) or a list (`losses.append(loss)`)
  fix: keep loss.detach() (or loss.item() where waiting for the device is fine)"""


def _case(keep: Any, steps: int = 8) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.kept, setup.last = [], deque(maxlen=3)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        keep(setup, loss)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": steps}


def buggy() -> dict[str, Any]:
    return _case(lambda setup, loss: setup.kept.append(loss))


def healthy() -> dict[str, Any]:
    return _case(lambda setup, loss: setup.kept.append(loss.detach()))


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "the last three losses": _case(lambda setup, loss: setup.last.append(loss), steps=12),
        "a sum that is reset": _case(_reset, steps=12),
        "truncated backpropagation through time": _truncated(),
        "two backward passes from one graph": _retained(),
        "a gradient penalty": _penalty(),
        "the last three outputs": _outputs(lambda setup, made: setup.last.append(made)),
        "outputs without their history": _outputs(lambda setup, made: setup.kept.append(made.detach())),
        "what is computed from the weights once": _once(),
    }


def _reset(setup: TrainingSetup, loss: torch.Tensor) -> None:
    setup.kept.append(loss)
    if setup.step_index % 4 == 3:
        setup.kept.clear()


def _truncated() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"cell": nn.GRUCell(6, 8), "head": nn.Linear(8, 1)})
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.hidden = torch.zeros(16, 8)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        setup.hidden = setup.model["cell"](batch[0], setup.hidden.detach())
        loss = (setup.model["head"](setup.hidden) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _retained() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 2)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        first, second = (setup.model(batch[0]) - batch[1]).square().mean(0)
        first.backward(retain_graph=True)
        second.backward()
        setup.optimizer.step()
        return first + second

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _penalty() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        made = setup.model(x)
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        loss = (made - batch[1]).square().mean() + 0.1 * (slope.norm(dim=1) - 1.0).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _outputs(keep: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.kept, setup.last = [], deque(maxlen=3)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        made = setup.model(batch[0])
        loss = (made - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        keep(setup, made)
        return loss.detach()

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 12}


def _once() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"scale": nn.Linear(6, 1, bias=False), "head": nn.Linear(6, 1)})
        setup = TrainingSetup(model, torch.optim.SGD(model["head"].parameters(), lr=0.05))
        model["scale"].requires_grad_(False)
        factor = torch.ones(6, requires_grad=True)
        setup.shift = factor * 2
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model["head"](batch[0] + setup.shift) - batch[1]).square().mean()
        loss.backward(retain_graph=True)
        setup.optimizer.step()
        return loss.detach()

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}
