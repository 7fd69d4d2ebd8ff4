"""Clips that accumulated gradients get, and full batches do not, or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "another bound": """\
Gradient accumulation: failed, 1 finding

[clip-differs] cycle 1 of 2: the gradients agree before clipping (norm 1.62) and differ as applied: 0.125 \
accumulated, 0.5 with the full batch
  cause: the bound of the clip is 0.125 with accumulation and 0.5 with the full batch
  fix: clip the accumulated gradients by the bound that is meant for the full batch's

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, clip, optimizer step, zero grad
        full batch   backward, clip, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.2901      0.07253      0.25
  0.bias     0.08219     0.02055      0.25
  2.weight   0.3676      0.0919       0.25
  2.bias     0.1547      0.03869      0.25""",
    "with accumulation only": """\
Gradient accumulation: failed, 1 finding

[clip-differs] cycle 1 of 2: the gradients agree before clipping (norm 1.62) and differ as applied: 0.5 accumulated, \
1.62 with the full batch
  cause: before the step, they are clipped once with accumulation, and not at all with the full batch
  fix: clip once, between the last backward() of a group and optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, clip, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0.2901       0.3084
  0.bias     0.2665      0.08219      0.3084
  2.weight   1.192       0.3676       0.3084
  2.bias     0.5018      0.1547       0.3084""",
    "without accumulation only": """\
Gradient accumulation: failed, 1 finding

[clip-differs] cycle 1 of 2: the gradients agree before clipping (norm 1.62) and differ as applied: 1.62 accumulated, \
0.5 with the full batch
  cause: before the step, they are clipped not at all with accumulation, and once with the full batch
  fix: clip once, between the last backward() of a group and optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, clip, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.2901      0.9408       3.243
  0.bias     0.08219     0.2665       3.243
  2.weight   0.3676      1.192        3.243
  2.bias     0.1547      0.5018       3.243""",
    "something after it": """\
Gradient accumulation: failed, 1 finding

[clip-differs] cycle 1 of 2: the gradients agree before clipping (norm 1.62) and differ as applied: 0.25 accumulated, \
0.5 with the full batch
  cause: something changes the gradients before the step otherwise than the full batch's: after the clip, they are \
multiplied by 0.5, and the full batch's by 1
  fix: look at what runs between the last backward() of a group and optimizer.step()

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, clip, gradient edit, optimizer step, zero grad
        full batch   backward, clip, gradient edit, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.2901      0.1451       0.5
  0.bias     0.08219     0.04109      0.5
  2.weight   0.3676      0.1838       0.5
  2.bias     0.1547      0.07737      0.5""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


Finish = Callable[[nn.Module, int], Any]


def _case(finish: Finish, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                finish(setup.model, k)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _norm(bound: Callable[[int], float]) -> Finish:
    return lambda model, k: clip_grad_norm_(model.parameters(), bound(k))


def _only(active: Callable[[int], bool]) -> Finish:
    return lambda model, k: clip_grad_norm_(model.parameters(), 0.5) if active(k) else None


def _then_scaled(factor: Callable[[int], float]) -> Finish:
    def finish(model: nn.Module, k: int) -> None:
        clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.grad *= factor(k)

    return finish


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "another bound": _case(_norm(lambda k: 0.5 / k)),
        "with accumulation only": _case(_only(lambda k: k > 1)),
        "without accumulation only": _case(_only(lambda k: k == 1)),
        "something after it": _case(_then_scaled(lambda k: 1.0 if k == 1 else 0.5)),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "another bound": _case(_norm(lambda k: 0.5)),
        "with accumulation only": _case(_only(lambda k: True)),
        "without accumulation only": _case(_only(lambda k: True)),
        "something after it": _case(_then_scaled(lambda k: 0.5)),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "another bound that is not reached": _case(_norm(lambda k: 100.0 * k)),
        "a bound on values": _case(lambda model, k: clip_grad_value_(model.parameters(), 0.1)),
        "a second clip that changes nothing": _case(
            lambda model, k: [clip_grad_norm_(model.parameters(), 0.5) for _ in range(2 if k > 1 else 1)]
        ),
    }
