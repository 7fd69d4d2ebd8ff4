"""Loops that compute in low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "autocast": """\
Gradient accumulation: passed, 1 note

Notes:
[low-precision] the loop computes in bfloat16: gradients were compared to 0.031 of each parameter's largest
  fix: check it in float32 too, where smaller differences show""",
    "weights": """\
Gradient accumulation: passed, 1 note

Notes:
[low-precision] the loop computes in bfloat16: gradients were compared to 0.031 of each parameter's largest
  fix: check it in float32 too, where smaller differences show""",
}

Step = Callable[[TrainingSetup, Any], Any]


def _case(dtype: torch.dtype | None, *, weights: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(weights)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                output = setup.model(batch[0].to(weights))
            loss = (output.float() - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "autocast": _case(torch.bfloat16),
        "weights": _case(None, weights=torch.bfloat16),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {"autocast": _case(None), "weights": _case(None, weights=torch.float32)}


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "double precision": _case(None, weights=torch.float64),
        "images of bytes": _case(None, data=((X * 40).to(torch.uint8), Y)),
    }
