"""A condition for the update that is never true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "in no call at all": """\
Gradient accumulation: failed, 1 finding

[never-updates] no optimizer stepped: not in 2 full batches with make_step(1), nor in 8 micro-batches with \
make_step(4)
  cause: the condition under which it steps was true in none of these calls
  fix: update after each 4th micro-batch: `if (setup.step_index + 1) % k == 0`""",
    "a counter that starts anew in each call": """\
Gradient accumulation: failed, 1 finding

[never-updates] optimizer 'optimizer' never stepped in 8 micro-batches with make_step(4), but did in 2 full batches \
with make_step(1)
  cause: the condition under which it steps was true in none of these 8 calls: a counter that never gets to 4 (it \
starts anew in each call), or one that counts to more than 8
  fix: update after each 4th micro-batch: `if (setup.step_index + 1) % k == 0`

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "one of two optimizers": """\
Gradient accumulation: failed, 1 finding

[never-updates] optimizer 'head' never stepped in 8 micro-batches with make_step(4), but did in 2 full batches with \
make_step(1)
  cause: the condition under which it steps was true in none of these 8 calls: a counter that never gets to 4 (it \
starts anew in each call), or one that counts to more than 8
  fix: update after each 4th micro-batch: `if (setup.step_index + 1) % k == 0`

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step 'body', zero grad
        full batch   backward, optimizer step 'body', zero grad, optimizer step 'head', zero grad""",
}

Due = Callable[[TrainingSetup, int], bool]


def _case(due: Due, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.seen = 0
        return setup

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if due(setup, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _two_optimizers(head_every: Callable[[int], int]) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        body = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return TrainingSetup(model, {"body": body, "head": torch.optim.Adam(model[2].parameters())})

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizers["body"].step()
                setup.optimizers["body"].zero_grad()
            if (setup.step_index + 1) % head_every(k) == 0:
                setup.optimizers["head"].step()
                setup.optimizers["head"].zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _counted(setup: TrainingSetup, k: int) -> bool:
    setup.seen += 1
    return setup.seen % k == 0


def _counted_anew(setup: TrainingSetup, k: int) -> bool:
    setup.seen = 0
    setup.seen += 1
    return setup.seen % k == 0


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "in no call at all": _case(lambda setup, k: setup.step_index % k == k),
        "a counter that starts anew in each call": _case(_counted_anew),
        "one of two optimizers": _two_optimizers(lambda k: k**2),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "in no call at all": _case(lambda setup, k: setup.step_index % k == k - 1),
        "a counter that starts anew in each call": _case(_counted),
        "one of two optimizers": _two_optimizers(lambda k: k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def in_closure(k: int) -> Callable[[TrainingSetup, Any], Any]:
        kept: list[Any] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            kept.append(batch)
            if len(kept) < k:
                return 0.0

            def closure() -> torch.Tensor:
                setup.optimizer.zero_grad()
                losses = [(setup.model(x) - y).square().mean() / k for x, y in kept]
                total = torch.stack(losses).sum()
                total.backward()
                return total

            loss = setup.optimizer.step(closure)
            kept.clear()
            return loss

        return step

    def frozen_body() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        model[0].requires_grad_(False)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.seen = 0
        return setup

    return {
        "micro-batches kept for a closure": {**_case(_counted), "make_step": in_closure},
        "a frozen part": {**_case(_counted), "make_setup": frozen_body},
        "three micro-batches": _case(
            lambda setup, k: setup.step_index % k == k - 1, accumulation_steps=3, data=(X[:15], Y[:15])
        ),
    }
