"""Gradients that differ in a way that no other rule explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "hooks that clamp each micro-batch's": """\
Gradient accumulation: failed, 1 finding

[gradients-differ] cycle 1 of 2: the accumulated gradients differ in 0.* (2 tensors): norm 1.33 instead of 1.3; \
0.weight -0.08 instead of -0.02; they are all that the micro-batches' backward passes added
  cause: undecided: 0.* (2 tensors) have gradient hooks (register_hook), which change each micro-batch's gradient by \
itself; or a part of the loss that is not divided, or a step that does something else for other accumulation steps
  fix: do what the hooks do once, to the accumulated gradients, before optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.1076      0.2901       2.697  0.8963
  0.bias     0.04207     0.07577      1.801  0.9741""",
    "another loss for more accumulation steps": """\
Gradient accumulation: failed, 1 finding

[gradients-differ] cycle 1 of 2: the accumulated gradients differ in all 4 parameters: norm 0.729 instead of 1.62; \
2.weight -0.335 instead of -0.803; they are all that the micro-batches' backward passes added
  cause: undecided: a part of the loss that is not divided, a step that does something else for other accumulation \
steps, or a loss that is neither a mean nor a sum over examples
  fix: compare what the step does for make_step(1) and for more: each micro-batch's loss must be its share of the \
full batch's

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.4555       0.4842  0.9706
  0.bias     0.2665      0.08879      0.3331  0.9442
  2.weight   1.192       0.5479       0.4596  0.984
  2.bias     0.5018      0.125        0.2491  1""",
    "another optimizer that steps in between": """\
Gradient accumulation: failed, 1 finding

[gradients-differ] cycle 1 of 2 (optimizer 'gen'): the accumulated gradients differ in gen.* (2 tensors): norm 0.64 \
instead of 0.776; gen.bias -0.111 instead of -0.254; they are all that the micro-batches' backward passes added
  cause: undecided: optimizer 'disc' steps in micro-batch 4 of 4 before backward() at gradients_differ.py:138: the \
passes of micro-batches 1, 2 and 3 of 4 ran with the weights before that step, the full batch's with those after it; \
a part of the loss that is not divided would show like this too
  fix: run all backward passes of a group before the first optimizer steps, or accumulate one optimizer's whole group \
before the other's begins

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, backward
  1     2 of 4       backward, backward
  2     3 of 4       backward, backward
  3     4 of 4       backward, optimizer step 'disc', backward, optimizer step 'gen', zero grad
        full batch   backward, optimizer step 'disc', backward, optimizer step 'gen', zero grad

Gradients as applied (L2 norms):
  parameter   full batch  accumulated  ratio   cosine
  gen.weight  0.45        0.3498       0.7774  0.9344
  gen.bias    0.6327      0.5363       0.8477  0.9565""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(loss_of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = loss_of(setup.model(batch[0]), batch[1], k)
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _square(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    return (output - target).square().mean()


def _hooked(bound: float) -> dict[str, Any]:
    def make_hooked() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        for parameter in model[0].parameters():
            parameter.register_hook(lambda grad: grad.clamp(-bound, bound))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return _case(_square) | {"make_setup": make_hooked}


def _gan(*, before: bool) -> dict[str, Any]:
    def make_gan() -> TrainingSetup:
        model = nn.ModuleDict({"gen": nn.Linear(6, 6), "disc": nn.Linear(6, 1)})
        return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.5) for name, part in model.items()})

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            gen, disc = setup.model["gen"], setup.model["disc"]
            due = (setup.step_index + 1) % k == 0
            real = (disc(gen(batch[0]).detach()).tanh() - disc(batch[0]).tanh()).mean()
            (real / k).backward()
            if due and before:
                setup.optimizers["disc"].step()
            fake = -disc(gen(batch[0])).tanh().mean()
            (fake / k).backward(inputs=list(gen.parameters()))
            if due:
                if not before:
                    setup.optimizers["disc"].step()
                setup.optimizers["gen"].step()
                for optimizer in setup.optimizers.values():
                    optimizer.zero_grad()
            return real + fake

        return step

    return {"make_setup": make_gan, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "hooks that clamp each micro-batch's": _hooked(0.02),
        "another loss for more accumulation steps": _case(
            lambda output, target, k: _square(output, target, k) if k == 1 else (output - target).abs().mean()
        ),
        "another optimizer that steps in between": _gan(before=True),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "hooks that clamp each micro-batch's": _hooked(20.0),
        "another loss for more accumulation steps": _case(
            lambda output, target, k: _square(output, target, k) if k >= 1 else (output - target).abs().mean()
        ),
        "another optimizer that steps in between": _gan(before=False),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_hooked() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 3.0 * grad)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_transformer() -> TrainingSetup:
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        model = nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 1))
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=1e-3))

    return {
        "hooks that scale": _case(_square) | {"make_setup": make_hooked},
        "a transformer with dropout": _case(_square) | {"make_setup": make_transformer},
        "two losses": _case(lambda output, target, k: _square(output, target, k) + 0.1 * output.exp().mean()),
    }
