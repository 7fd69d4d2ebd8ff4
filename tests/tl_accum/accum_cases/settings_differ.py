"""Settings of an optimizer that accumulation changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a warm-up that counts micro-batches": """\
Gradient accumulation: failed, 1 finding

[settings-differ] optimizer 'optimizer' group 0['lr'] is 0.04 after cycle 1 of 2, and 0.01 with full batches
  cause: it is set by hand in micro-batches 1, 2, 3 and 4 of 4: a schedule that counts micro-batches, not updates
  fix: compute it from the number of updates (setup.step_index // k), and set it once an update

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "multiplied by the accumulation steps": """\
Gradient accumulation: failed, 1 finding

[settings-differ] optimizer 'optimizer' group 0['lr'] is 0.4 after cycle 1 of 2, and 0.1 with full batches
  cause: it is multiplied by the 4 accumulation steps, although the full batch is the same
  fix: use the settings that the full batch is trained with

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "a root of the accumulation steps": """\
Gradient accumulation: failed, 1 finding

[settings-differ] optimizer 'optimizer' group 0['lr'] is 0.2 after cycle 1 of 2, and 0.1 with full batches
  cause: it is set once, to another value for other accumulation steps
  fix: use the settings that the full batch is trained with

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "set once an update, by the micro-batch": """\
Gradient accumulation: failed, 1 finding

[settings-differ] optimizer 'optimizer' group 0['lr'] is 0.0970299 after cycle 1 of 2, and 0.1 with full batches
  cause: undecided: it is computed from the step's index, from a counter that counts micro-batches, or from the \
accumulation steps
  fix: compute it from the number of updates (setup.step_index // k)

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
}

Step = Callable[[TrainingSetup, Any], Any]


Rate = Callable[[int, int], float]


def _case(rate: Rate, *, when: Callable[[int, int], bool] = lambda index, k: True, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if when(setup.step_index, k):
                setup.optimizer.param_groups[0]["lr"] = rate(setup.step_index, k)
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _never_again(index: int, k: int) -> bool:
    return index == 0


def _update(index: int, k: int) -> bool:
    return (index + 1) % k == 0


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "a warm-up that counts micro-batches": _case(lambda index, k: 0.01 * (index + 1)),
        "multiplied by the accumulation steps": _case(lambda index, k: 0.1 * k, when=_never_again),
        "a root of the accumulation steps": _case(lambda index, k: 0.1 * k**0.5, when=_never_again),
        "set once an update, by the micro-batch": _case(lambda index, k: 0.1 * 0.99**index, when=_update),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "a warm-up that counts micro-batches": _case(lambda index, k: 0.01 * (index // k + 1)),
        "multiplied by the accumulation steps": _case(lambda index, k: 0.1, when=_never_again),
        "a root of the accumulation steps": _case(lambda index, k: 0.1, when=_never_again),
        "set once an update, by the micro-batch": _case(lambda index, k: 0.1 * 0.99 ** (index // k), when=_update),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def tensor_rate() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False))

    return {
        "a warm-up of updates, set in each micro-batch": _case(lambda index, k: 0.01 * (index // k + 1), cycles=4),
        "a rate that is set in the middle of a group": _case(
            lambda index, k: 0.02 * (index // k + 1), when=lambda index, k: index % k == k // 2, cycles=3
        ),
        "a tensor as rate": _case(lambda index, k: 0.1, when=lambda index, k: False) | {"make_setup": tensor_rate},
    }
