"""Gradients that something else than a clip changes before the update."""

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
    "divided in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 1 of 2: the gradients were multiplied by 0.25 after micro-batches 1, 2 and 3 of 4, before all \
of them were added up: the update used gradients of norm 0.586 instead of 1.62
  cause: what is done to them hits the gradients of the earlier micro-batches again in each later one
  fix: change gradients (divide, unscale, clip, add noise) once, between the last backward() of a group and \
optimizer.step(); or divide the loss instead

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, gradient edit
  1     2 of 4       backward, gradient edit
  2     3 of 4       backward, gradient edit
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2822       0.3     0.9237
  0.bias     0.2665      0.135        0.5064  0.9074
  2.weight   1.192       0.4156       0.3486  0.9627
  2.bias     0.5018      0.2692       0.5365  1""",
    "normalised in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 1 of 2: the gradients were changed (norm 0.202 to 2) after micro-batches 1, 2 and 3 of 4, \
before all of them were added up: the update used gradients of norm 2 instead of 2, in another direction (cosine \
0.131)
  cause: what is done to them hits the gradients of the earlier micro-batches again in each later one
  fix: change gradients (divide, unscale, clip, add noise) once, between the last backward() of a group and \
optimizer.step(); or divide the loss instead

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, gradient edit
  1     2 of 4       backward, gradient edit
  2     3 of 4       backward, gradient edit
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   1           1            1      0.9231
  0.bias     1           1            1      -0.3624
  2.weight   1           1            1      0.9628
  2.bias     1           1            1      -1""",
    "a term added in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 1 of 2: the gradients were changed (norm 0.202 to 0.231) after micro-batches 1, 2 and 3 of 4, \
before all of them were added up: the update used gradients of norm 1.51 instead of 1.57
  cause: a term is added to them in every micro-batch, where an update should have it once
  fix: change gradients (divide, unscale, clip, add noise) once, between the last backward() of a group and \
optimizer.step(); or divide the loss instead

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, gradient edit
  1     2 of 4       backward, gradient edit
  2     3 of 4       backward, gradient edit
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9144      0.9309       1.018   0.9222
  0.bias     0.2644      0.327        1.237   0.8476
  2.weight   1.147       1.029        0.8968  0.9877
  2.bias     0.5042      0.5112       1.014   1""",
    "scaled at the end, with accumulation only": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 1 of 2: the micro-batches' gradients add up to the full batch's (norm 1.62), and are \
multiplied by 0.5 before the step (with the full batch by 1)
  cause: what scales the gradients before the step depends on the accumulation steps, as their sum does not
  fix: scale the gradients as for the full batch: by the same factor, whatever the accumulation steps

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, gradient edit, optimizer step, zero grad
        full batch   backward, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.4704       0.5
  0.bias     0.2665      0.1333       0.5
  2.weight   1.192       0.5961       0.5
  2.bias     0.5018      0.2509       0.5""",
    "divided after the clip": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 1 of 2: the clip at gradient_edited.py:185 finds gradients 4x the full batch's (norm 6.49 \
instead of 1.62), which are multiplied by 0.25 after it
  cause: the gradients are divided by the 4 accumulation steps after the clip instead of before it, so that its bound \
of 0.5 is 4x too tight
  fix: divide the loss, or the gradients before the clip

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, clip, gradient edit, optimizer step, zero grad
        full batch   backward, clip, gradient edit, optimizer step, zero grad

Gradients before clipping (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      3.763        4
  0.bias     0.2665      1.066        4
  2.weight   1.192       4.768        4
  2.bias     0.5018      2.007        4""",
    "a list of gradients that zero_grad() dropped": """\
Gradient accumulation: failed, 1 finding

[gradient-edited] cycle 2 of 2: the gradients were multiplied by 0.25 before the step in the cycle before, and are \
not in this one: they are 4x the full batch's
  cause: what scales the gradients reaches other tensors from then on: ones that were collected once, before \
zero_grad() dropped them (set_to_none), or under a condition that is no longer true
  fix: take p.grad anew each time, or divide the loss

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.8291      3.316        4
  0.bias     0.165       0.6599       4
  2.weight   1.002       4.009        4
  2.bias     0.2501      1.001        4""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Edit = Callable[[nn.Module, int], None]


def _divide(model: nn.Module, k: int) -> None:
    for parameter in model.parameters():
        parameter.grad /= k


def _normalise(model: nn.Module, k: int) -> None:
    for parameter in model.parameters():
        parameter.grad /= parameter.grad.norm()


def _decay(model: nn.Module, k: int) -> None:
    for parameter in model.parameters():
        parameter.grad += 0.1 * parameter.detach()


def _clip(model: nn.Module, k: int) -> None:
    clip_grad_norm_(model.parameters(), 0.5)


def _case(*, every: tuple[Edit, ...] = (), last: tuple[Edit, ...] = (), divide: bool = False) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k if divide else loss).backward()
            due = (setup.step_index + 1) % k == 0
            for edit in (*every, *last) if due else every:
                edit(setup.model, k)
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _kept_list(*, anew: bool) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        grads: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                if anew or not grads:
                    grads[:] = [parameter.grad for parameter in setup.model.parameters()]
                for grad in grads:
                    grad.div_(k)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _scale_for(factor: Callable[[int], float]) -> Edit:
    def edit(model: nn.Module, k: int) -> None:
        for parameter in model.parameters():
            parameter.grad *= factor(k)

    return edit


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "divided in every micro-batch": _case(every=(_divide,)),
        "normalised in every micro-batch": _case(every=(_normalise,), divide=True),
        "a term added in every micro-batch": _case(every=(_decay,), divide=True),
        "scaled at the end, with accumulation only": _case(
            last=(_scale_for(lambda k: 0.5 if k > 1 else 1.0),), divide=True
        ),
        "divided after the clip": _case(last=(_clip, _divide)),
        "a list of gradients that zero_grad() dropped": _kept_list(anew=False),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "divided in every micro-batch": _case(last=(_divide,)),
        "normalised in every micro-batch": _case(last=(_normalise,), divide=True),
        "a term added in every micro-batch": _case(last=(_decay,), divide=True),
        "scaled at the end, with accumulation only": _case(last=(_scale_for(lambda k: 0.5),), divide=True),
        "divided after the clip": _case(last=(_divide, _clip)),
        "a list of gradients that zero_grad() dropped": _kept_list(anew=True),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_mean(k: int) -> Step:
        # a running mean of gradients: those so far weigh i / (i + 1)
        def step(setup: TrainingSetup, batch: Any) -> Any:
            place = setup.step_index % k
            for parameter in setup.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= place / (place + 1)
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / (place + 1)).backward()
            if place + 1 == k:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {
        "divided at the end": _case(last=(_divide,)),
        "a sign at the end": _case(last=(lambda model, k: [p.grad.sign_() for p in model.parameters()],), divide=True),
        "a running mean": _case() | {"make_step": make_mean},
    }


NOTED = {"a running mean": ("edit-without-effect",), "a list of gradients that zero_grad() dropped": ()}
