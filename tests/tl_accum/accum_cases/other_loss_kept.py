"""Gradients of a loss that is meant for other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "a generator's": """\
Gradient accumulation: failed, 1 finding

[other-loss-kept] cycle 1 of 2 (optimizer 'disc'): the accumulated gradients hold what backward() at \
other_loss_kept.py:56 added in micro-batches 2, 3 and 4 of 4 (norm 0.936); with the full batch it is cleared before \
the update
  cause: a loss that is meant for other parameters reaches these too, and its gradients are not cleared in every \
micro-batch
  fix: keep that loss's gradients away from these parameters: backward(inputs=...), or requires_grad_(False) while it \
runs

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, zero grad, backward
  1     2 of 4       backward, backward
  2     3 of 4       backward, backward
  3     4 of 4       backward, backward, optimizer step 'gen', zero grad, optimizer step 'disc', zero grad
        full batch   backward, zero grad, backward, optimizer step 'gen', zero grad, optimizer step 'disc', zero grad

Gradients as applied (L2 norms):
  parameter      full batch  accumulated  ratio   cosine
  disc.0.weight  0.3682      0.2116       0.5747  0.9406
  disc.0.bias    0.635       0.2373       0.3737  0.9997
  disc.2.weight  0.6441      0.3081       0.4784  0.9777
  disc.2.bias    1.244       0.4944       0.3973  1""",
}


def make_setup() -> TrainingSetup:
    model = nn.ModuleDict({"gen": nn.Linear(6, 6), "disc": nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))})
    return TrainingSetup(model, {name: torch.optim.Adam(part.parameters()) for name, part in model.items()})


def _case(*, clear: Callable[[int, int], bool], only_gen: bool = False, freeze: bool = False) -> dict[str, Any]:
    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            gen, disc = setup.model["gen"], setup.model["disc"]
            disc.requires_grad_(not freeze)
            fake = -disc(gen(batch[0])).mean()
            (fake / k).backward(inputs=list(gen.parameters()) if only_gen else None)
            disc.requires_grad_(True)
            if clear(setup.step_index, k):
                setup.optimizers["disc"].zero_grad()
            real = (disc(gen(batch[0]).detach()) - disc(batch[0])).mean() + disc(batch[0]).square().mean()
            (real / k).backward()
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            return {"disc": real, "gen": fake}

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _at_start(index: int, k: int) -> bool:
    return index % k == 0


def buggy() -> dict[str, dict[str, Any]]:
    return {"a generator's": _case(clear=_at_start)}


def healthy() -> dict[str, dict[str, Any]]:
    return {"a generator's": _case(clear=_at_start, only_gen=True)}


NOTED = {"gradients that are put back": ("edit-without-effect",)}


def near_misses() -> dict[str, dict[str, Any]]:
    def make_kept(k: int) -> Callable[[TrainingSetup, Any], Any]:
        # what the discriminator had is put back after the generator's pass
        def step(setup: TrainingSetup, batch: Any) -> Any:
            gen, disc = setup.model["gen"], setup.model["disc"]
            real = (disc(gen(batch[0]).detach()) - disc(batch[0])).mean() + disc(batch[0]).square().mean()
            (real / k).backward()
            kept = [parameter.grad.clone() for parameter in disc.parameters()]
            fake = -disc(gen(batch[0])).mean()
            (fake / k).backward()
            for parameter, grad in zip(disc.parameters(), kept, strict=True):
                parameter.grad = grad
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            return {"disc": real, "gen": fake}

        return step

    def make_meant(k: int) -> Callable[[TrainingSetup, Any], Any]:
        # both losses are meant for both parts
        def step(setup: TrainingSetup, batch: Any) -> Any:
            made = setup.model["gen"](batch[0])
            one, other = setup.model["disc"](made).square().mean(), (made - batch[0]).square().mean()
            (one / k).backward(retain_graph=True)
            (other / k).backward()
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            return one + other

        return step

    return {
        "a frozen discriminator": _case(clear=_at_start, freeze=True),
        "gradients that are put back": _case(clear=_at_start) | {"make_step": make_kept},
        "two losses for the same parameters": _case(clear=_at_start) | {"make_step": make_meant},
    }
