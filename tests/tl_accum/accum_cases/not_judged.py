"""Loops in which accumulation cannot be compared with the full batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "batch norm": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the layer '1' cannot be the same for a batch and for its micro-batches: run with fixed statistics, \
everything agrees
  cause: the statistics of each micro-batch are not the full batch's
  fix: put it in eval mode (frozen statistics), or train with GroupNorm or LayerNorm, to have accumulation equal the \
full batch; or check the loop with such a model""",
    "batch norm, and a loss that is not divided": """\
Gradient accumulation: failed, 1 finding

[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 6.63 instead of 1.66)
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
  fix: call backward() on loss / k

Notes:
[not-judged] the layer '1' ran with fixed statistics for this comparison: what it uses or moves in every forward pass \
differs for a batch and for its micro-batches

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
  1.weight   0.2188      0.8753       4
  1.bias     0.2665      1.066        4
  3.weight   1.192       4.768        4
  3.bias     0.5018      2.007        4""",
    "spectral norm": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the layer '1' cannot be the same for a batch and for its micro-batches: run in eval mode, everything \
agrees
  cause: something in a forward pass moves a buffer, once for a full batch and once for each micro-batch
  fix: put it in eval mode to have accumulation equal the full batch; or check the loop with such a model""",
    "gradients of 0": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the full batch's gradients are all 0: they could not be compared
  fix: give the check batches whose loss depends on the weights""",
    "gradients that are not finite": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the full batch's gradients are not finite: they could not be compared
  fix: run the loop under tl_telemetry's run_training(...).assert_finite() to see where they come from""",
    "noise": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the loop differs from itself when it is repeated, by up to 1.07 of its largest gradient, since the step \
draws random numbers: gradients and weights could not be compared
  fix: draw no random numbers in the step, or the same for a batch as for its micro-batches""",
    "a scaler that skips every step": """\
Gradient accumulation: could not judge

Notes:
[not-judged] the GradScaler skipped every step, of full batches too: at its loss scale, the gradients hold Inf or NaN
  fix: start it with a smaller init_scale, or pass more cycles, so that it gets there by itself""",
    "updates by hand": """\
Gradient accumulation: could not judge

Notes:
[not-judged] no optimizer of the setup stepped, and the weights moved all the same: only what optimizers update can \
be compared
  fix: put the optimizer that makes the updates into the setup, or write them as an optimizer's step()""",
}

Step = Callable[[TrainingSetup, Any], Any]


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _case(
    *layers: Callable[[], nn.Module], loss_of: Loss = _square, divide: bool = True, init_scale: float = 0.0
) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), *[layer() for layer in layers], nn.Tanh(), nn.Linear(5, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale) if init_scale else None
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=1e-4), scaler=scaler)

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = loss_of(setup.model(batch[0]), batch[1]) / (k if divide else 1)
            scaled = setup.scaler.scale(loss) if setup.scaler is not None else loss
            scaled.backward()
            if (setup.step_index + 1) % k == 0:
                if setup.scaler is not None:
                    setup.scaler.step(setup.optimizer)
                    setup.scaler.update()
                else:
                    setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _large(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 1e3 * _square(output, target)


def _spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(5, 5))


def _by_hand(*, steps: bool) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = _square(setup.model(batch[0]), batch[1])
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                if steps:
                    setup.optimizer.step()
                else:
                    with torch.no_grad():
                        for parameter in setup.model.parameters():
                            parameter.sub_(parameter.grad, alpha=0.1)
                setup.model.zero_grad()
            return loss

        return step

    return _case() | {"make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "batch norm": _case(lambda: nn.BatchNorm1d(5)),
        "batch norm, and a loss that is not divided": _case(lambda: nn.BatchNorm1d(5), divide=False),
        "spectral norm": _case(_spectral),
        "gradients of 0": _case(loss_of=lambda output, target: 0.0 * _square(output, target)),
        "gradients that are not finite": _case(loss_of=lambda output, target: (output - output).sqrt().mean()),
        "noise": _case(loss_of=lambda output, target: (output * torch.randn_like(output)).mean()),
        "a scaler that skips every step": _case(loss_of=_large, init_scale=2.0**127),
        "updates by hand": _by_hand(steps=False),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "batch norm": _case(lambda: nn.LayerNorm(5)),
        "batch norm, and a loss that is not divided": _case(lambda: nn.LayerNorm(5)),
        "spectral norm": _case(lambda: nn.Linear(5, 5)),
        "gradients of 0": _case(loss_of=_square),
        "gradients that are not finite": _case(loss_of=lambda output, target: (output - target + 1e2).sqrt().mean()),
        "noise": _case(loss_of=lambda output, target: (output * torch.ones_like(output)).mean()),
        "a scaler that skips every step": _case(loss_of=_large, init_scale=2.0**16),
        "updates by hand": _by_hand(steps=True),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_frozen() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
        model.train()
        model[1].eval()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return {
        "batch norm in eval mode": _case() | {"make_setup": make_frozen},
        "instance norm": _case(lambda: nn.Unflatten(1, (1, 5)), lambda: nn.InstanceNorm1d(1), lambda: nn.Flatten()),
        "weight norm": _case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))),
    }
