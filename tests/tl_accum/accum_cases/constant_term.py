"""A term of the loss that does not depend on the data, and is added undivided in every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "an L2 penalty": """\
Gradient accumulation: failed, 1 finding

[constant-term] cycle 1 of 2: the accumulated gradients hold 4 times a term that the full batch's hold once: it is \
the same in every micro-batch (norm 0.0303, in all 4 parameters), so that the norm is 1.58 instead of 1.61
  cause: a term of the loss that does not depend on the data (its gradient is 0.02 times the weights: an L2 penalty) \
is added to each micro-batch's loss after that was divided by 4
  fix: divide the whole loss by k, the term included; or add the term in one micro-batch of the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9343      0.9185       0.9831  0.9971
  0.bias     0.2651      0.2638       0.9952  0.9914
  2.weight   1.183       1.156        0.9772  0.9996
  2.bias     0.5023      0.5037       1.003   1""",
    "an L1 penalty of one layer": """\
Gradient accumulation: failed, 1 finding

[constant-term] cycle 1 of 2: the accumulated gradients hold 4 times a term that the full batch's hold once: it is \
the same in every micro-batch (norm 0.0548, in 0.weight), so that the norm is 1.63 instead of 1.62
  cause: a term of the loss that does not depend on the data (its gradient is 0.01 times the weights' signs: an L1 \
penalty) is added to each micro-batch's loss after that was divided by 4
  fix: divide the whole loss by k, the term included; or add the term in one micro-batch of the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.9383      0.9499       1.012  0.9849""",
    "another penalty": """\
Gradient accumulation: failed, 1 finding

[constant-term] cycle 1 of 2: the accumulated gradients hold 4 times a term that the full batch's hold once: it is \
the same in every micro-batch (norm 0.285, in 0.weight), so that the norm is 2.04 instead of 1.66
  cause: a term of the loss that does not depend on the data is added to each micro-batch's loss after that was \
divided by 4
  fix: divide the whole loss by k, the term included; or add the term in one micro-batch of the group

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   1.012       1.554        1.535  0.8613""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Penalty = Callable[[nn.Module], torch.Tensor]
Weight = Callable[[int, int], float]


def _case(penalty: Penalty, weight: Weight, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean() / k
            loss = loss + weight(setup.step_index, k) * penalty(setup.model)
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _l2(model: nn.Module) -> torch.Tensor:
    return sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(()))


def _l1(model: nn.Module) -> torch.Tensor:
    return model[0].weight.abs().sum()


def _orthogonal(model: nn.Module) -> torch.Tensor:
    weight = model[0].weight
    return (weight @ weight.T - torch.eye(5)).square().sum()


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "an L2 penalty": _case(_l2, lambda index, k: 0.01),
        "an L1 penalty of one layer": _case(_l1, lambda index, k: 0.01),
        "another penalty": _case(_orthogonal, lambda index, k: 0.1),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "an L2 penalty": _case(_l2, lambda index, k: 0.01 / k),
        "an L1 penalty of one layer": _case(_l1, lambda index, k: 0.01 / k),
        "another penalty": _case(_orthogonal, lambda index, k: 0.1 / k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def adamw() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))

    return {
        "a penalty in the last micro-batch only": _case(_l2, lambda index, k: 0.01 if (index + 1) % k == 0 else 0.0),
        "a penalty in the first micro-batch only": _case(_l1, lambda index, k: 0.01 if index % k == 0 else 0.0),
        "weight decay of the optimizer": _case(_l2, lambda index, k: 0.0) | {"make_setup": adamw},
        "a penalty on the activations": _case(lambda model: model[0](X[:4]).square().mean(), lambda index, k: 0.1 / k),
    }
