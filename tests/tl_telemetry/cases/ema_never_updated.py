"""An average of the weights whose update is never called."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[ema-never-updated] setup.state['ema'] (_Average) started as a copy of the weights and never changed in 6 updates; no \
forward pass used it
  cause: nothing wrote to it, and it stays at the initial weights: its update is not called, does not write in \
place (`e = e.lerp(...)` for `e.lerp_(...)`), or finds none of its names (a prefix)
  fix: call its update after each optimizer.step(), and let it write in place; if it is due less often than in every 6 \
updates, run more steps"""


class _Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float = 0.99, after: int = 0) -> None:
        self.decay, self.after, self.calls = decay, after, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.calls += 1
        if self.calls > self.after:
            for name, p in model.named_parameters():
                self.shadow[name].lerp_(p, 1.0 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.shadow)


class _Anchor:
    """The weights to stay close to (L2-SP); its alpha is no averaging."""

    def __init__(self, model: nn.Module, alpha: float = 0.01) -> None:
        self.alpha = alpha
        self.weights = [p.detach().clone() for p in model.parameters()]

    def penalty(self, model: nn.Module) -> torch.Tensor:
        pairs = zip(model.parameters(), self.weights, strict=True)
        return self.alpha * sum((p - anchor).square().sum() for p, anchor in pairs)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}


class _Helper:
    """Steps with a momentum, and saves the model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.momentum = model, 0.9

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}


def _case(update: Any, make: Any = _Average, name: str = "ema", steps: int = 6) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={name: make(model)})

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        if isinstance(setup.state[name], _Anchor):
            loss = loss + setup.state[name].penalty(setup.model)
        loss.backward()
        setup.optimizer.step()
        update(setup)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": steps}


def buggy() -> dict[str, Any]:
    return _case(update=lambda setup: None)


def healthy() -> dict[str, Any]:
    return _case(update=lambda setup: setup.state["ema"].update(setup.model))


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "an average updated in every fifth step": _case(_every_fifth, steps=6),
        "an average that only counts so far": _case(
            lambda setup: setup.state["ema"].update(setup.model), lambda model: _Average(model, after=100)
        ),
        "an anchor to stay close to": _case(lambda setup: None, _Anchor, "anchor"),
        "torch's averaged model": _case(
            lambda setup: setup.state["ema"].update_parameters(setup.model), torch.optim.swa_utils.AveragedModel
        ),
        "equal weights that start later": _case(lambda setup: None, torch.optim.swa_utils.AveragedModel, "swa"),
        "a network that follows slowly": _case(_polyak, copy.deepcopy, "target"),
        "the best weights so far": _case(lambda setup: None, copy.deepcopy, "best"),
        "a run of two steps": _case(lambda setup: None, steps=2),
        "a reference model that is only asked": _teacher(),
        "an average that hardly moves": _case(
            lambda setup: setup.state["ema"].update(setup.model), lambda model: _Average(model, decay=0.9999)
        ),
        "a helper that shows the model's own weights": _case(lambda setup: None, _Helper, "helper"),
        "a dict of tensors that follows": _case(_dict_follows, lambda model: dict(_copies(model))),
        "a dict of tensors that stays": _case(lambda setup: None, lambda model: dict(_copies(model)), "anchor"),
    }


def _copies(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


@torch.no_grad()
def _dict_follows(setup: TrainingSetup) -> None:
    for name, p in setup.model.named_parameters():
        setup.state["ema"][name] = 0.9 * setup.state["ema"][name] + 0.1 * p


def _every_fifth(setup: TrainingSetup) -> None:
    if setup.step_index % 5 == 4:
        setup.state["ema"].update(setup.model)


@torch.no_grad()
def _polyak(setup: TrainingSetup) -> None:
    for target, p in zip(setup.state["target"].parameters(), setup.model.parameters(), strict=True):
        target.lerp_(p, 0.01)


def _teacher() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            state={"reference": copy.deepcopy(model).requires_grad_(False)},
        )

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss = loss + (setup.model(batch[0]) - setup.state["reference"](batch[0])).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}
