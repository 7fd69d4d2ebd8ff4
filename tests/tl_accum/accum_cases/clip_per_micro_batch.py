"""Clips that run before all gradients are added up."""

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
Gradient accumulation: failed, 1 finding

[clip-per-micro-batch] cycle 1 of 2: the clip at clip_per_micro_batch.py:78 changed the gradients in micro-batches 2 \
and 3 of 4, before all of them were added up: norm 0.606 to 0.3 in the first; they added up to norm 0.649 instead of \
1.62
  cause: the clip runs in every micro-batch and bounds parts of the sum, the first ones again and again
  fix: clip once, between the last backward() of a group and optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, clip
  1     2 of 4       backward, clip
  2     3 of 4       backward, clip
  3     4 of 4       backward, clip, optimizer step, zero grad
        full batch   backward, clip, optimizer step, zero grad

Gradients before clipping (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.3273       0.3479  0.9473
  0.bias     0.2665      0.139        0.5216  0.9333
  2.weight   1.192       0.4669       0.3916  0.9753
  2.bias     0.5018      0.278        0.554   1""",
    "by value": """\
Gradient accumulation: failed, 1 finding

[clip-per-micro-batch] cycle 1 of 2: the clip at clip_per_micro_batch.py:101 changed the gradients in micro-batches \
1, 2 and 3 of 4, before all of them were added up: norm 0.202 to 0.199 in the first; they added up to norm 0.831 \
instead of 1.62
  cause: the clip runs in every micro-batch and bounds parts of the sum, the first ones again and again
  fix: clip once, between the last backward() of a group and optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, clip
  1     2 of 4       backward, clip
  2     3 of 4       backward, clip
  3     4 of 4       backward, clip, optimizer step, zero grad
        full batch   backward, clip, optimizer step, zero grad

Gradients before clipping (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.5831       0.6198  0.9467
  0.bias     0.2665      0.2179       0.8174  0.9906
  2.weight   1.192       0.4618       0.3874  0.9395
  2.bias     0.5018      0.301        0.5998  1""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Clip = Callable[[Any], Any]


def _norm(bound: float) -> Clip:
    return lambda parameters: clip_grad_norm_(parameters, bound)


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


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "by the norm": _case(_norm(0.3), every=True),
        "by value": _case(lambda parameters: clip_grad_value_(parameters, 0.1), every=True),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "by the norm": _case(_norm(0.3), every=False),
        "by value": _case(lambda parameters: clip_grad_value_(parameters, 0.1), every=False),
    }


NOTED = {"a bound that is not reached": ("clip-without-effect",)}


def near_misses() -> dict[str, dict[str, Any]]:
    def make_by_layer(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                for layer in setup.model:
                    clip_grad_norm_(list(layer.parameters()), 0.1)
                clip_grad_norm_(setup.model.parameters(), 0.3)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {
        "a bound that is not reached": _case(_norm(50.0), every=True),
        "an infinite bound, to measure": _case(_norm(float("inf")), every=True),
        "an absurd bound, to measure": _case(_norm(1e9), every=True),
        "each layer, then all": _case(_norm(0.3), every=False) | {"make_step": make_by_layer},
    }
