"""Loops that differ from themselves when they are repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "noise on the inputs": """\
Gradient accumulation: passed, 1 note

Notes:
[noise] the loop differs from itself when it is repeated, by up to 0.048 of its largest gradient, since the step \
draws random numbers: all that was judged is when optimizers and schedulers step, what is lost or left over between \
micro-batches, and the scale of the gradients
  fix: draw no random numbers in the step, or the same for a batch as for its micro-batches""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(noise: Callable[[Any], torch.Tensor], **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            x, y = batch
            loss = (setup.model(x + noise(x)) - y).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def buggy() -> dict[str, dict[str, Any]]:
    return {"noise on the inputs": _case(lambda x: 0.05 * torch.randn_like(x))}


def healthy() -> dict[str, dict[str, Any]]:
    return {"noise on the inputs": _case(lambda x: 0.0 * torch.randn_like(x))}


def near_misses() -> dict[str, dict[str, Any]]:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, 6, generator=generator).expand(len(x), 6)

    def dropped() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return {
        "the same noise for every example": _case(seeded),
        "dropout": _case(lambda x: torch.zeros_like(x)) | {"make_setup": dropped},
        "random numbers that nothing uses": _case(lambda x: torch.zeros_like(x) * torch.rand(())),
    }
