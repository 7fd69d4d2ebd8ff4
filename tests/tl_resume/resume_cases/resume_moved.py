"""Half of the steps is in the middle of an accumulation cycle: the resume is at the next update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup, standard_step

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[resume-moved] resumed at step 6 instead of 4: step 3 left the weights as they were, so that gradients may have been \
pending
  fix: pass resume_at=4 to save there all the same"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(accumulation_steps: int, resume_at: int | None = None) -> dict[str, Any]:
    step = standard_step(loss_fn, accumulation_steps=accumulation_steps)
    return {"make_setup": make_setup, "data": (X, Y), "step": step, "resume_at": resume_at}


def buggy() -> dict[str, Any]:
    return _case(accumulation_steps=3)


def healthy() -> dict[str, Any]:
    return _case(accumulation_steps=2)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a step that was asked for": _case(accumulation_steps=3, resume_at=4),
        "no accumulation": _case(accumulation_steps=1),
    }
