"""Frozen parameters that move: an optimizer with weight decay still holds them, with gradients of zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[frozen-moved] 0.* (2 tensors) moved by up to 0.0562 an update although frozen (requires_grad=False; steps 3-7)
  cause: 'optimizer' still holds them, and their .grad is a tensor of zeros instead of None: it steps them, and \
weight decay or momentum from earlier gradients moves them
  fix: set .grad to None when freezing (zero_grad(set_to_none=True)), or leave frozen parameters out of the \
optimizer"""


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _freezing(set_to_none: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index == 3:
            setup.model[0].requires_grad_(False)
        setup.optimizer.zero_grad(set_to_none=set_to_none)
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def buggy() -> dict[str, Any]:
    return _freezing(set_to_none=False)


def healthy() -> dict[str, Any]:
    return _freezing(set_to_none=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "frozen from the start, in the optimizer, without gradients": _frozen_from_start(),
        "frozen between backward and step": _frozen_before_step(),
        "zeroth-order training of frozen parameters": _zeroth_order(),
        "thawed during the run": _thawed(),
        "frozen layers moved by hand": _polyak_teacher(),
        "nothing that frozen= names moves": {**_frozen_from_start(), "judge": {"frozen": ["0.*"]}},
    }


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def _frozen_from_start() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        model[0].requires_grad_(False)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 8}


def _frozen_before_step() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        if setup.step_index == 3:
            setup.model[0].requires_grad_(False)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _zeroth_order() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net().requires_grad_(False)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        parameters = list(setup.model.parameters())
        directions = [torch.randn_like(p) for p in parameters]

        def loss_at(shift: float) -> torch.Tensor:
            for p, direction in zip(parameters, directions, strict=True):
                p.add_(direction, alpha=shift)
            return (setup.model(batch[0]) - batch[1]).square().mean()

        up, down = loss_at(1e-3), loss_at(-2e-3)
        loss_at(1e-3)
        for p, direction in zip(parameters, directions, strict=True):
            p.grad = direction * ((up - down) / 2e-3)
        setup.optimizer.step()
        return up

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _thawed() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        model[0].requires_grad_(False)
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index == 4:
            setup.model[0].requires_grad_(True)
        return _train(setup, batch)

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


class _WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = _net(), _net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)


def _polyak_teacher() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _WithTeacher()
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        with torch.no_grad():
            target = setup.model.teacher(batch[0])
        loss = (setup.model(batch[0]) - batch[1]).square().mean() + (setup.model(batch[0]) - target).square().mean()
        loss.backward()
        setup.optimizer.step()
        with torch.no_grad():
            pairs = zip(setup.model.teacher.parameters(), setup.model.student.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.lerp_(student, 0.1)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}
