"""Losses with a scale that depends on the accumulation steps otherwise than it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "an integer division": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are all 0 (the full batch's have a norm of 1.62)
  cause: the loss is multiplied by 0 for 4 accumulation steps: an integer division (`1 // k`), or a weight that is 0
  fix: call backward() on loss / k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0            0
  0.bias     0.2665      0            0
  2.weight   1.192       0            0
  2.bias     0.5018      0            0""",
    "a sum that is divided": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 0.25x the full batch's (norm 6.49 instead of 25.9)
  cause: the loss is a sum over the batch and is divided by the 4 accumulation steps: sums of micro-batches are \
added, not averaged
  fix: do not divide a summed loss by k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   15.05       3.763        0.25
  0.bias     4.264       1.066        0.25
  2.weight   19.07       4.768        0.25
  2.bias     8.029       2.007        0.25""",
    "by a number of processes too": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 0.5x the full batch's (norm 0.811 instead of 1.62)
  cause: the loss of a micro-batch is divided by 8 instead of by 4
  fix: divide the loss by the number of micro-batches in the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.4704       0.5
  0.bias     0.2665      0.1333       0.5
  2.weight   1.192       0.5961       0.5
  2.bias     0.5018      0.2509       0.5""",
    "by one less": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 1.33x the full batch's (norm 2.16 instead of 1.62)
  cause: the loss of a micro-batch is divided by 3 instead of by 4
  fix: divide the loss by the number of micro-batches in the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      1.254        1.333
  0.bias     0.2665      0.3554       1.333
  2.weight   1.192       1.589        1.333
  2.bias     0.5018      0.6691       1.333""",
    "by the root": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 2x the full batch's (norm 3.24 instead of 1.62)
  cause: the loss of a micro-batch is divided by 2 instead of by 4
  fix: divide the loss by the number of micro-batches in the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      1.882        2
  0.bias     0.2665      0.5331       2
  2.weight   1.192       2.384        2
  2.bias     0.5018      1.004        2""",
    "a sum over the micro-batch's size": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 0.5x the full batch's (norm 0.811 instead of 1.62)
  cause: the loss of a micro-batch is divided by 8 instead of by 4
  fix: divide the loss by the number of micro-batches in the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.4704       0.5
  0.bias     0.2665      0.1333       0.5
  2.weight   1.192       0.5961       0.5
  2.bias     0.5018      0.2509       0.5""",
    "one of two backward passes": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the gradients of one of 2 backward passes a micro-batch have another scale than the \
full batch's: 0.5x from backward() at wrong_loss_scale.py:217, 1x from wrong_loss_scale.py:216
  cause: that loss is divided by another number than the others
  fix: divide each loss that backward() is called on by k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, backward
  1     2 of 4       backward, backward
  2     3 of 4       backward, backward
  3     4 of 4       backward, backward, optimizer step, zero grad
        full batch   backward, backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.7306      0.7979       1.092  0.9414
  0.bias     0.1159      0.16         1.38   0.6035
  2.weight   0.7141      0.9168       1.284  0.9359
  2.bias     0.03841     0.2701       7.032  1""",
    "one of two parts": """\
Gradient accumulation: failed, 1 finding

[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are other multiples of the full batch's for other \
parameters: 1x in one.* (2 tensors) and 0.5x in two.* (2 tensors)
  cause: undecided: parts of the loss are divided by different numbers, or the gradients of these parameters are
  fix: divide the whole loss by k, after its terms are added

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter   full batch  accumulated  ratio
  two.weight  2.279       1.14         0.5
  two.bias    1.16        0.5798       0.5""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(factor: Callable[[int, int], float], *, reduction: str = "mean", **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1], reduction=reduction)
            (loss * factor(k, len(batch[0]))).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _two_passes(other: Callable[[int], float]) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            output = setup.model(batch[0])
            loss, penalty = (output - batch[1]).square().mean(), output.square().mean()
            (loss / k).backward(retain_graph=True)
            (penalty / other(k)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _parts(other: Callable[[int], float]) -> dict[str, Any]:
    def make_two() -> TrainingSetup:
        model = nn.ModuleDict({"one": nn.Linear(6, 1), "two": nn.Linear(6, 1)})
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            one = (setup.model["one"](batch[0]) - batch[1]).square().mean()
            two = (setup.model["two"](batch[0]) + batch[1]).square().mean()
            (one / k + two / other(k)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return one + two

        return step

    return {"make_setup": make_two, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "an integer division": _case(lambda k, n: 1 // k),
        "a sum that is divided": _case(lambda k, n: 1 / k, reduction="sum"),
        "by a number of processes too": _case(lambda k, n: 1 / (k if k == 1 else 2 * k)),
        "by one less": _case(lambda k, n: 1 / max(k - 1, 1)),
        "by the root": _case(lambda k, n: 1 / k**0.5),
        "a sum over the micro-batch's size": _case(lambda k, n: 1 / n / (k if k == 1 else 8), reduction="sum"),
        "one of two backward passes": _two_passes(lambda k: 1 if k == 1 else 2 * k),
        "one of two parts": _parts(lambda k: 1 if k == 1 else 2 * k),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "an integer division": _case(lambda k, n: 1 / k),
        "a sum that is divided": _case(lambda k, n: 1.0, reduction="sum"),
        "by a number of processes too": _case(lambda k, n: 1 / k),
        "by one less": _case(lambda k, n: 1 / max(k, 1)),
        "by the root": _case(lambda k, n: 1 / k),
        "a sum over the micro-batch's size": _case(lambda k, n: 1 / n / k, reduction="sum"),
        "one of two backward passes": _two_passes(lambda k: k),
        "one of two parts": _parts(lambda k: k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a sum over the full batch's size": _case(lambda k, n: 1 / 16, reduction="sum"),
        "a sum over the size of all micro-batches": _case(lambda k, n: 1 / (n * k), reduction="sum"),
        "a weight for the whole run": _case(lambda k, n: 1e-6 / k),
        "a large weight for the whole run": _case(lambda k, n: 1e6 / k) | {"make_setup": _frozen_lr},
    }


def _frozen_lr() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=1e-8))
