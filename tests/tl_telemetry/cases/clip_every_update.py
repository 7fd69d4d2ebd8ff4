"""A clip that every update runs into."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[clip-every-update] clip_grad_norm_() at clip_every_update.py:34 scaled the gradients down to 0.1 in 6 of 6 calls \
(steps 0-5): the norm before was 3.46 to 3.6, 3.55 in the median
  cause: undecided: the bound is meant to be tight (every update then has the same length), or the gradients are \
larger than they should be (targets or losses on an unusual scale, an exploding layer)
  fix: nothing, if a tight bound is meant; else normalise the targets, or raise the bound; max_grad_norm= makes a \
norm before clipping that is too large a finding"""


def _case(bound: float, **clip_options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        clip_grad_norm_(setup.model.parameters(), bound, **clip_options)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(bound=0.1)


def healthy() -> dict[str, Any]:
    return _case(bound=10.0)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "clipped at first only": _case(bound=2.5),
        "a bound on the largest element": _case(bound=2.9, norm_type=float("inf")),
        "an infinite bound, to measure": _case(bound=float("inf")),
        "an absurd bound, to measure": _case(bound=1e9),
    }
