"""Micro-batches that count more than others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a running sum of losses": """\
Gradient accumulation: failed, 1 finding

[unequal-micro-batches] cycle 1 of 2: the micro-batches count 1, 0.75, 0.5, 0.25 in the accumulated gradients, \
instead of 0.25 each (norm 3.56 instead of 1.62)
  cause: each backward pass runs over the sum of all losses so far, so that earlier micro-batches count again
  fix: call backward() on the loss of the current micro-batch only, divided by k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.9408      2.218        2.358  0.9939
  0.bias     0.2665      0.4943       1.855  0.9439
  2.weight   1.192       2.627        2.203  0.9955
  2.bias     0.5018      0.7618       1.518  1""",
    "divided by the place": """\
Gradient accumulation: failed, 1 finding

[unequal-micro-batches] cycle 1 of 2: the micro-batches count 1, 0.5, 0.333, 0.25 in the accumulated gradients, \
instead of 0.25 each (norm 2.59 instead of 1.62)
  cause: their losses are divided by different numbers, or scaled by a factor that changes within the group
  fix: divide the loss of every micro-batch by the same number: the size of its group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      1.639        1.743   0.987
  0.bias     0.2665      0.3309       1.241   0.8847
  2.weight   1.192       1.932        1.621   0.994
  2.bias     0.5018      0.4361       0.8691  1""",
    "the last one undivided": """\
Gradient accumulation: failed, 1 finding

[unequal-micro-batches] cycle 1 of 2: the micro-batches count 0.25, 0.25, 0.25, 1 in the accumulated gradients, \
instead of 0.25 each (norm 2.71 instead of 1.62)
  cause: their losses are divided by different numbers, or scaled by a factor that changes within the group
  fix: divide the loss of every micro-batch by the same number: the size of its group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.9408      1.419        1.508  0.9455
  0.bias     0.2665      0.5531       2.075  0.948
  2.weight   1.192       1.952        1.638  0.9797
  2.bias     0.5018      1.105        2.202  1""",
    "a loss of no weight": """\
Gradient accumulation: failed, 1 finding

[unequal-micro-batches] cycle 1 of 2: the micro-batches count 0.25, 0, 0.25, 0.25 in the accumulated gradients, \
instead of 0.25 each (norm 1.16 instead of 1.62)
  cause: their losses are divided by different numbers, or scaled by a factor that changes within the group
  fix: divide the loss of every micro-batch by the same number: the size of its group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.6675       0.7095  0.9591
  0.bias     0.2665      0.1771       0.6646  0.9968
  2.weight   1.192       0.8721       0.7316  0.9947
  2.bias     0.5018      0.3347       0.6669  1""",
    "gradients of autograd.grad that replace those before": """\
Gradient accumulation: failed, 1 finding

[unequal-micro-batches] cycle 1 of 2: the micro-batches count 0, 0, 0, 0.25 in the accumulated gradients, instead of \
0.25 each (norm 0.409 instead of 1.62)
  cause: the gradients of each micro-batch replace those before, or the losses of all but the last are worth 0
  fix: add the gradients of all micro-batches of a group up

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       gradient edit
  2     3 of 4       gradient edit
  3     4 of 4       gradient edit, optimizer step, zero grad
        full batch   optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Factor = Callable[[int, int], float]


def _case(factor: Factor, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss * factor(setup.step_index % k, k)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _running(*, start_anew: bool) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean() / k
            if start_anew or setup.step_index % k == 0:
                setup.total = torch.zeros(())
            setup.total = setup.total + loss
            setup.total.backward(retain_graph=True)
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _by_autograd(scale: Callable[[int], float], *, add: bool = True) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            parameters = list(setup.model.parameters())
            loss = (setup.model(batch[0]) - batch[1]).square().mean() / scale(k)
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = parameter.grad + grad if add and parameter.grad is not None else grad
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "a running sum of losses": _running(start_anew=False),
        "divided by the place": _case(lambda place, k: 1 / (place + 1)),
        "the last one undivided": _case(lambda place, k: 1.0 if place == k - 1 else 1 / k),
        "a loss of no weight": _case(lambda place, k: 0.0 if k > 1 and place == 1 else 1 / k),
        "gradients of autograd.grad that replace those before": _by_autograd(lambda k: k, add=False),
    }


def healthy() -> dict[str, dict[str, Any]]:
    even = _case(lambda place, k: 1 / k)
    return {
        "a running sum of losses": _running(start_anew=True),
        "divided by the place": even,
        "the last one undivided": even,
        "a loss of no weight": even,
        "gradients of autograd.grad that replace those before": _by_autograd(lambda k: k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_sorted(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().sum() / 16
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    def by_size(batch: Any, parts: int) -> list[Any]:
        sizes = [7, 5, 3, 1]
        return list(zip(*(tensor.split(sizes) for tensor in batch), strict=True))

    return {
        "micro-batches of several sizes, and sums": _case(lambda place, k: 1.0)
        | {"make_step": make_sorted, "split": by_size},
        "losses of very different sizes": _case(lambda place, k: 1 / k, data=(X * X[:, :1].abs().sort(0).values, Y)),
        "three micro-batches, so that thirds do not add up to 1": _case(
            lambda place, k: 1 / k, data=(X[:15], Y[:15]), accumulation_steps=3
        ),
    }
