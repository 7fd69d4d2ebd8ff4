"""Gradients that are clipped when the update has used them already."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[clip-after-step] clip_grad_norm_() at clip_after_step.py:36 clipped gradients that an update had used already (6 of \
6 calls, steps 0-5): a norm of 3.6 had been applied unclipped (seen in step 0), with a bound of 0.5
  cause: the clip comes after optimizer.step()
  fix: clip between backward() and optimizer.step() (with a GradScaler: after scaler.unscale_(optimizer))"""


def _case(clip_first: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        if clip_first:
            clip_grad_norm_(setup.model.parameters(), 0.5)
        setup.optimizer.step()
        if not clip_first:
            clip_grad_norm_(setup.model.parameters(), 0.5)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(clip_first=False)


def healthy() -> dict[str, Any]:
    return _case(clip_first=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a norm measured after the step": _with(_measured_after),
        "clipped in a closure": _with(_in_closure, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)),
        "one clip for each micro-batch": _with(_each_micro_batch),
        "clipped by value": _with(_by_value),
        "two optimizers that take turns": _turns(),
    }


def _with(step: Any, make_optimizer: Any = lambda p: torch.optim.SGD(p, lr=0.05)) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, make_optimizer(model.parameters()))

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _backward(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    return loss


def _measured_after(setup: TrainingSetup, batch: Any) -> dict[str, Any]:
    setup.optimizer.zero_grad()
    loss = _backward(setup, batch)
    setup.optimizer.step()
    return {"loss": loss, "grad_norm": clip_grad_norm_(setup.model.parameters(), float("inf"))}


def _in_closure(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    def closure() -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = _backward(setup, batch)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        return loss

    return setup.optimizer.step(closure)


def _each_micro_batch(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = _backward(setup, batch)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    if setup.step_index % 2:
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return loss


def _by_value(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = _backward(setup, batch)
    nn.utils.clip_grad_value_(setup.model.parameters(), 0.1)
    setup.optimizer.step()
    return loss


def _turns() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
        optimizers = {name: torch.optim.Adam(model[name].parameters(), lr=0.01) for name in model}
        return TrainingSetup(model, optimizers)

    def step(setup: TrainingSetup, batch: Any) -> dict[str, Any]:
        maker, judge = setup.model["maker"], setup.model["judge"]
        losses = {}
        for name, module, sign in (("judge", judge, 1.0), ("maker", maker, -1.0)):
            setup.optimizers[name].zero_grad()
            made = maker(batch[0]) if name == "maker" else maker(batch[0]).detach()
            losses[name] = sign * (judge(made) - judge(batch[0])).mean().tanh()
            losses[name].backward()
            clip_grad_norm_(module.parameters(), 5.0)
            setup.optimizers[name].step()
        return {"loss": losses["judge"], **losses}

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}
