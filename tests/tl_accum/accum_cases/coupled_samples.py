"""Losses that couple the examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "negatives within the batch": """\
Gradient accumulation: failed, 1 finding

[coupled-samples] cycle 1 of 2: no weighing of the 4 micro-batches' gradients gives the full batch's (norm 0.663; \
accumulated 0.576)
  cause: the loss, or a layer, couples the examples of a batch: negatives within the batch (contrastive losses), \
statistics or a ranking over the batch, something from elsewhere that is taken by the place in the batch, a \
perturbation of the weights by the batch's own gradient. More examples then mean another loss, and accumulation \
cannot reproduce it
  fix: gather what the examples are compared with over the whole group (a memory bank, cached embeddings), or accept \
micro-batches as the batch size of this loss: allow=["coupled-samples"]

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.358       0.3365       0.9401  0.9382
  0.bias     0.2307      0.1882       0.8156  0.9995
  2.weight   0.375       0.3214       0.857   0.9632
  2.bias     0.3427      0.2829       0.8256  1""",
    "targets normalised over the batch": """\
Gradient accumulation: failed, 1 finding

[coupled-samples] cycle 1 of 2: no weighing of the 4 micro-batches' gradients gives the full batch's (norm 1.02; \
accumulated 0.815)
  cause: the loss, or a layer, couples the examples of a batch: negatives within the batch (contrastive losses), \
statistics or a ranking over the batch, something from elsewhere that is taken by the place in the batch, a \
perturbation of the weights by the batch's own gradient. More examples then mean another loss, and accumulation \
cannot reproduce it
  fix: gather what the examples are compared with over the whole group (a memory bank, cached embeddings), or accept \
micro-batches as the batch size of this loss: allow=["coupled-samples"]

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.5811      0.4295       0.7391  0.921
  0.bias     0.3251      0.2942       0.905   0.9948
  2.weight   0.6162      0.4217       0.6843  0.9596""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = loss_of(setup.model(batch[0]), batch[1])
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output @ target.T, torch.arange(len(output)))


def _normalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - (target - target.mean()) / target.std()).square().mean()


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "negatives within the batch": _case(_contrast),
        "targets normalised over the batch": _case(_normalised),
    }


def healthy() -> dict[str, dict[str, Any]]:
    bank = Y

    def against_bank(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        places = (target == bank.T).float().argmax(dim=1)
        return nn.functional.cross_entropy(output @ bank.T, places)

    def normalised_before(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - (target - Y.mean()) / Y.std()).square().mean()

    return {
        "negatives within the batch": _case(against_bank),
        "targets normalised over the batch": _case(normalised_before),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # pairs of neighbours, which no micro-batch parts
        one, two = output.view(-1, 2).T
        return nn.functional.softplus(one - two).mean()

    def make_layer_norm() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    return {
        "pairs within micro-batches": _case(pairs),
        "a layer that normalises each example": _case(square) | {"make_setup": make_layer_norm},
    }
