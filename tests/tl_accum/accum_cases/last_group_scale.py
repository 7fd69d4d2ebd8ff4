"""An incomplete last group whose losses are divided by the wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

EPOCH = 10  # micro-batches

MESSAGES = {
    "by a complete group's": """\
Gradient accumulation: failed, 1 finding

[last-group-scale] the update of the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) \
uses gradients 0.5x the full batch's
  cause: its losses are divided by 4, the size of a complete group, and not by the 2 that there are
  fix: divide by the size of the group that the micro-batch belongs to: `min(k, 10 - i // k * k)`, where i counts the \
micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.8463      0.4231       0.5
  0.bias     0.1604      0.0802       0.5
  2.weight   0.7834      0.3917       0.5
  2.bias     0.07388     0.03694      0.5""",
    "not at all": """\
Gradient accumulation: failed, 1 finding

[last-group-scale] the update of the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) \
uses gradients 2x the full batch's
  cause: its losses are not divided by the 2 that there are
  fix: divide by the size of the group that the micro-batch belongs to: `min(k, 10 - i // k * k)`, where i counts the \
micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.8463      1.693        2
  0.bias     0.1604      0.3208       2
  2.weight   0.7834      1.567        2
  2.bias     0.07388     0.1478       2""",
    "by another number": """\
Gradient accumulation: failed, 1 finding

[last-group-scale] the update of the last 2 micro-batches of an epoch of 10 (groups of 4, incomplete last group of 2) \
uses gradients 0.667x the full batch's
  cause: its losses are divided by 3 and not by the 2 that there are
  fix: divide by the size of the group that the micro-batch belongs to: `min(k, 10 - i // k * k)`, where i counts the \
micro-batches of an epoch from 0

What acted in the incomplete last group of the epoch (2 micro-batches):
  step  micro-batch  acts
  8     1 of 2       backward
  9     2 of 2       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.8463      0.5642       0.6667
  0.bias     0.1604      0.1069       0.6667
  2.weight   0.7834      0.5223       0.6667
  2.bias     0.07388     0.04925      0.6667""",
}


def _case(size: Callable[[int, int], float], *, reduce: str = "mean", **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        epoch = EPOCH if k > 1 else 1

        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % epoch
            loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1], reduction=reduce)
            (loss / size(place, k)).backward()
            if (place + 1) % k == 0 or place + 1 == epoch:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step, "epoch_length": EPOCH} | options


def _own(place: int, k: int) -> int:
    return k if k == 1 else min(k, EPOCH - place // k * k)


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "by a complete group's": _case(lambda place, k: k),
        "not at all": _case(lambda place, k: 1 if k > 1 and place >= EPOCH // k * k else k),
        "by another number": _case(lambda place, k: 3 if k > 1 and place >= EPOCH // k * k else k),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "by a complete group's": _case(_own),
        "not at all": _case(lambda place, k: 2 if k > 1 and place >= EPOCH // k * k else k),
        "by another number": _case(lambda place, k: 2 if k > 1 and place >= EPOCH // k * k else k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "summed losses": _case(lambda place, k: 1, reduce="sum"),
        "a last group of one": _case(lambda place, k: k if k == 1 else min(k, 9 - place // k * k), epoch_length=9)
        | {"make_step": _nine},
        "epochs of whole groups": _case(lambda place, k: k, epoch_length=None),
    }


def _nine(k: int) -> Callable[[TrainingSetup, Any], Any]:
    def step(setup: TrainingSetup, batch: Any) -> Any:
        place = setup.step_index % 9
        last = k > 1 and place == 8
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        (loss if last else loss / k).backward()
        if (place + 1) % k == 0 or last:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss

    return step
