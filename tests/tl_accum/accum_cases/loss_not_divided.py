"""Losses that are means over a micro-batch, and are not divided by the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "the whole loss": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 6.49 instead of 1.62)
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
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
  0.weight   0.9408      3.763        4
  0.bias     0.2665      1.066        4
  2.weight   1.192       4.768        4
  2.bias     0.5018      2.007        4""",
    "the whole loss, hidden by a clip": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 6.49 instead of 1.62); the \
clip at loss_not_divided.py:179 hides it from the weights: after it, the gradients agree
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
  fix: call backward() on loss / k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, clip, optimizer step, zero grad
        full batch   backward, clip, optimizer step, zero grad

Gradients before clipping (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      3.763        4
  0.bias     0.2665      1.066        4
  2.weight   1.192       4.768        4
  2.bias     0.5018      2.007        4""",
    "a part of the loss": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: a part of the loss, with gradients of norm 0.288 (of 0.828) in the first \
micro-batch, most of them in aux.* (2 tensors), body.weight, has another share in the accumulated gradients than the \
rest: norm 1.76 instead of 1.62
  cause: that part is not divided by the 4 accumulation steps, the rest is (steps made for 4 and for 8 accumulation \
steps show it)
  fix: divide the whole loss by k, once, after its terms are added

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter    full batch  accumulated  ratio   cosine
  body.weight  0.9289      0.907        0.9763  0.9886
  body.bias    0.2646      0.334        1.263   0.8375
  aux.weight   0.08462     0.3385       4       1
  aux.bias     0.15        0.6          4       1""",
    "one of two backward passes": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the gradients of one of 2 backward passes a micro-batch have another scale than the \
full batch's: 4x from backward() at loss_not_divided.py:200, 1x from loss_not_divided.py:199
  cause: that loss is not divided by the 4 accumulation steps, the others are
  fix: divide each loss that backward() is called on by k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, backward
  1     2 of 4       backward, backward
  2     3 of 4       backward, backward
  3     4 of 4       backward, backward, optimizer step, zero grad
        full batch   backward, backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter    full batch  accumulated  ratio  cosine
  body.weight  0.91        0.9738       1.07   0.8791
  body.bias    0.3107      0.8186       2.635  0.7743
  aux.weight   0.2821      1.128        4      1
  aux.bias     0.5         2            4      1""",
    "the whole loss, under Adam": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 6.49 instead of 1.62)
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
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
  0.weight   0.9408      3.763        4
  0.bias     0.2665      1.066        4
  2.weight   1.192       4.768        4
  2.bias     0.5018      2.007        4""",
    "the whole loss, by autograd.grad": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 6.49 instead of 1.62)
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
  fix: call backward() on loss / k

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       gradient edit
  2     3 of 4       gradient edit
  3     4 of 4       gradient edit, optimizer step, zero grad
        full batch   optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      3.763        4
  0.bias     0.2665      1.066        4
  2.weight   1.192       4.768        4
  2.bias     0.5018      2.007        4""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Heads(nn.Module):
    """A body with two heads: each has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)

    def losses(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(batch[0]).tanh()
        return (self.main(hidden) - batch[1]).square().mean(), (self.aux(hidden) - batch[1].abs()).abs().mean()


def _case(divide: Callable[[int], float], *, bound: float = 0.0, mean: bool = True, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            errors = (setup.model(batch[0]) - batch[1]).square()
            loss = errors.mean() if mean else errors.sum()
            (loss / divide(k)).backward()
            if (setup.step_index + 1) % k == 0:
                if bound:
                    clip_grad_norm_(setup.model.parameters(), bound)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _heads(*, divide_aux: bool, two_passes: bool = False) -> dict[str, Any]:
    def make_heads() -> TrainingSetup:
        model = Heads()
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            main, aux = setup.model.losses(batch)
            main, aux = main / k, aux / k if divide_aux else aux
            if two_passes:
                main.backward(retain_graph=True)
                aux.backward()
            else:
                (main + 0.3 * aux).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return main

        return step

    return {"make_setup": make_heads, "data": (X, Y), "make_step": make_step}


def _by_autograd(scale: Callable[[int], float]) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            parameters = list(setup.model.parameters())
            loss = (setup.model(batch[0]) - batch[1]).square().mean() / scale(k)
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = parameter.grad + grad if parameter.grad is not None else grad
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "the whole loss": _case(lambda k: 1),
        "the whole loss, hidden by a clip": _case(lambda k: 1, bound=0.1),
        "a part of the loss": _heads(divide_aux=False),
        "one of two backward passes": _heads(divide_aux=False, two_passes=True),
        "the whole loss, under Adam": _case(lambda k: 1) | {"make_setup": _adam},
        "the whole loss, by autograd.grad": _by_autograd(lambda k: 1),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "the whole loss": _case(lambda k: k),
        "the whole loss, hidden by a clip": _case(lambda k: k, bound=0.1),
        "a part of the loss": _heads(divide_aux=True),
        "one of two backward passes": _heads(divide_aux=True, two_passes=True),
        "the whole loss, under Adam": _case(lambda k: k) | {"make_setup": _adam},
        "the whole loss, by autograd.grad": _by_autograd(lambda k: k),
    }


def _adam() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.01))


def near_misses() -> dict[str, dict[str, Any]]:
    def make_divided(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            loss.backward(torch.tensor(1.0 / k))
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    def make_gradients_divided(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                for parameter in setup.model.parameters():
                    parameter.grad /= k
                clip_grad_norm_(setup.model.parameters(), 0.1)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    plain = _case(lambda k: k)
    return {
        "a summed loss": _case(lambda k: 100, mean=False),
        "backward() with a gradient of 1 / k": plain | {"make_step": make_divided},
        "gradients divided before the clip": plain | {"make_step": make_gradients_divided},
    }
