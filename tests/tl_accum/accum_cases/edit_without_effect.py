"""Gradients that are changed between micro-batches, and agree all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a running mean": """\
Gradient accumulation: passed, 1 note

Notes:
[edit-without-effect] the gradients were changed after micro-batches 1, 2 and 3 of 4 of cycle 1 of 2, before all of \
them were added up, and the gradients of the update agree all the same
  fix: nothing, if an earlier state of them is put back; else change gradients (divide, clip, add noise) once, \
between the last backward() of a group and optimizer.step()""",
    "noise in every micro-batch": """\
Gradient accumulation: passed, 2 notes

Notes:
[edit-without-effect] the gradients were changed after micro-batches 1, 2 and 3 of 4 of cycle 1 of 2, before all of \
them were added up; what they make of the update is below the loop's own noise
  fix: nothing, if an earlier state of them is put back; else change gradients (divide, clip, add noise) once, \
between the last backward() of a group and optimizer.step()

[noise] the loop differs from itself when it is repeated, by up to 0.202 of its largest gradient, since the step \
draws random numbers: all that was judged is when optimizers and schedulers step, what is lost or left over between \
micro-batches, and the scale of the gradients
  fix: draw no random numbers in the step, or the same for a batch as for its micro-batches""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _weighed(*, mean: bool) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % k
            if mean and place:
                for parameter in setup.model.parameters():
                    parameter.grad *= place / (place + 1)
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / (place + 1 if mean else k)).backward()
            if place + 1 == k:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _noisy(*, every: bool) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            due = (setup.step_index + 1) % k == 0
            if every or due:
                for parameter in setup.model.parameters():
                    parameter.grad += 0.05 * torch.randn_like(parameter)
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {"a running mean": _weighed(mean=True), "noise in every micro-batch": _noisy(every=True)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"a running mean": _weighed(mean=False), "noise in every micro-batch": _noisy(every=False)}


def near_misses() -> dict[str, dict[str, Any]]:
    def divided(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                for parameter in setup.model.parameters():
                    parameter.grad /= k
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    def in_buffer(k: int) -> Step:
        kept: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            own = [parameter.grad for parameter in setup.model.parameters()]
            kept[:] = [old + new for old, new in zip(kept, own, strict=True)] if kept else own
            setup.optimizer.zero_grad()
            if (setup.step_index + 1) % k == 0:
                for parameter, grad in zip(setup.model.parameters(), kept, strict=True):
                    parameter.grad = grad
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                kept.clear()
            return loss

        return step

    plain = _weighed(mean=False)
    return {
        "divided once, at the end": plain | {"make_step": divided},
        "moved to a buffer": plain | {"make_step": in_buffer},
    }
