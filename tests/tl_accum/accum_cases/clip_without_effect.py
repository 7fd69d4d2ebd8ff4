"""Clips in every micro-batch that changed nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "by the norm": """\
Gradient accumulation: passed, 1 note

Notes:
[clip-without-effect] clip_grad_norm_() at clip_without_effect.py:63 runs in micro-batches 1, 2 and 3 of 4 of cycle 1 \
of 2, where it changed nothing yet: its bound of 50 was not reached
  fix: clip once, between the last backward() of a group and optimizer.step()""",
    "by value": """\
Gradient accumulation: passed, 1 note

Notes:
[clip-without-effect] clip_grad_value_() at clip_without_effect.py:69 runs in micro-batches 1, 2 and 3 of 4 of cycle \
1 of 2, where it changed nothing yet: its bound of 50 was not reached
  fix: clip once, between the last backward() of a group and optimizer.step()""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Clip = Callable[[Any], Any]


def _case(clip: Clip, *, every: bool, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if every or (setup.step_index + 1) % k == 0:
                clip(setup.model.parameters())
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _norm(bound: float) -> Clip:
    return lambda parameters: clip_grad_norm_(parameters, bound)


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "by the norm": _case(_norm(50.0), every=True),
        "by value": _case(lambda parameters: clip_grad_value_(parameters, 50.0), every=True),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "by the norm": _case(_norm(50.0), every=False),
        "by value": _case(lambda parameters: clip_grad_value_(parameters, 50.0), every=False),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "an infinite bound, to measure": _case(_norm(float("inf")), every=True),
        "a clip that is reached": _case(_norm(0.3), every=False),
    }
