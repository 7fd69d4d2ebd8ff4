"""A scale of the gradients that something between the last backward pass and the step hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "signs": """\
Gradient accumulation: passed, 1 note

Notes:
[hidden-scale] the accumulated gradients are 4x the full batch's after the last backward(), and agree as applied, \
with a norm of 6.4 in every update
  cause: undecided: what runs in between makes up for the scale (a division by hand), or hides it (a clip by hand, \
the gradients' signs)
  fix: nothing, if the gradients are divided by hand; else call backward() on loss / k""",
    "a clip by hand": """\
Gradient accumulation: passed, 1 note

Notes:
[hidden-scale] the accumulated gradients are 4x the full batch's after the last backward(), and agree as applied, \
with a norm of 0.1 in every update
  cause: undecided: what runs in between makes up for the scale (a division by hand), or hides it (a clip by hand, \
the gradients' signs)
  fix: nothing, if the gradients are divided by hand; else call backward() on loss / k""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Finish = Callable[[nn.Module, int], Any]


def _case(finish: Finish, *, divide: bool, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k if divide else loss).backward()
            if (setup.step_index + 1) % k == 0:
                finish(setup.model, k)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _sign(model: nn.Module, k: int) -> None:
    for parameter in model.parameters():
        parameter.grad.sign_()


def _clip(bound: float) -> Finish:
    def clip(model: nn.Module, k: int) -> None:
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, bound / float(norm))

    return clip


def buggy() -> dict[str, dict[str, Any]]:
    return {"signs": _case(_sign, divide=False), "a clip by hand": _case(_clip(0.1), divide=False)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"signs": _case(_sign, divide=True), "a clip by hand": _case(_clip(0.1), divide=True)}


def near_misses() -> dict[str, dict[str, Any]]:
    def by_hand(model: nn.Module, k: int) -> None:
        for parameter in model.parameters():
            parameter.grad /= k

    return {
        "a division by hand": _case(by_hand, divide=False),
        "one cycle, of which nothing tells": _case(by_hand, divide=False, cycles=1),
        "a clip by hand that is not reached": _case(_clip(100.0), divide=True),
    }
