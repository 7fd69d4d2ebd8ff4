"""A clip that touches none of the stepped gradients: it runs before there are any."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[clip-misses] clip_grad_norm_() at clip_misses.py:32 clipped none of the stepped gradients: none of its 2 tensors had \
a gradient at that time (6 calls, steps 0-5)
  cause: it runs before backward(): there is nothing to clip at that time
  fix: clip between backward() and optimizer.step()"""


def _case(clip_first: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        if clip_first:
            clip_grad_norm_(setup.model.parameters(), 1.0)
        loss.backward()
        if not clip_first:
            clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(clip_first=True)


def healthy() -> dict[str, Any]:
    return _case(clip_first=False)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "only a part is clipped": _with(lambda model: model[0].parameters()),
        "a generator": _with(lambda model: (p for p in model.parameters() if p.requires_grad)),
        "a single tensor": _with(lambda model: model[2].weight),
        "the parameters of an optimizer's groups": _with(lambda model: [p for p in model.parameters() if p.ndim > 1]),
        "the two halves of the clip functions": _halves(),
        "a frozen part is clipped too": _with_frozen(),
        "the first clip of a resumed loop finds nothing": _every_other(),
        "a perturbation's gradient": _perturbed(),
        "two players, each clipped before its step": _players(clip_all=False),
        "two players, all clipped before each step": _players(clip_all=True),
    }


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _with(parameters: Any, freeze: bool = False) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        model[0].requires_grad_(not freeze)
        return TrainingSetup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        clip_grad_norm_(parameters(setup.model), 10.0)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _with_frozen() -> dict[str, Any]:
    return _with(lambda model: model.parameters(), freeze=True)


def _halves() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        parameters = list(setup.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, 10.0, norm)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _every_other() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        # the update of one step's gradients is made at the start of the next step
        clip_grad_norm_(setup.model.parameters(), 10.0)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _perturbed() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        delta = torch.zeros_like(batch[0]).requires_grad_()
        (setup.model(batch[0] + delta) - batch[1]).square().mean().backward()
        clip_grad_norm_([delta], 1.0)
        setup.optimizer.zero_grad()
        loss = (setup.model((batch[0] + delta.grad).detach()) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _players(clip_all: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"maker": nn.Linear(2, 6), "judge": _net()})
        return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in model.items()})

    def step(setup: TrainingSetup, batch: Any) -> dict[str, torch.Tensor]:
        maker, judge = setup.model["maker"], setup.model["judge"]
        made = maker(torch.randn(16, 2))
        losses = {
            "judge": lambda: (judge(batch[0]) - 1).square().mean() + judge(made.detach()).square().mean(),
            "maker": lambda: (judge(made) - 1).square().mean(),
        }
        results = {}
        for name, loss_fn in losses.items():
            setup.model.zero_grad()
            results[name] = loss_fn()
            results[name].backward()
            clip_grad_norm_((setup.model if clip_all else setup.model[name]).parameters(), 1.0)
            setup.optimizers[name].step()
        return results

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}
