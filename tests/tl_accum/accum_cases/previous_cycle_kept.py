"""Gradients that nobody clears after an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "of all optimizers": """\
Gradient accumulation: failed, 1 finding

[previous-cycle-kept] cycle 2 of 2 (optimizers 'body' and 'head'; the figures are those of 'body'): the gradients \
still hold the cycle before (norm 0.978), on top of what this one's 4 micro-batches added (norm 0.845)
  cause: nothing cleared these gradients after the update before
  fix: call optimizer.zero_grad() after optimizer.step()

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step 'body', optimizer step 'head'
        full batch   zero grad, backward, optimizer step 'body', optimizer step 'head'

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  0.weight   0.8291      1.765        2.129  0.9968
  0.bias     0.165       0.4153       2.517  0.9388
  2.weight   1.002       2.192        2.187  0.9985
  2.bias     0.2501      0.752        3.006  1""",
    "of one of two": """\
Gradient accumulation: failed, 1 finding

[previous-cycle-kept] cycle 2 of 2 (optimizer 'head'): the gradients still hold the cycle before (norm 1.29), on top \
of what this one's 4 micro-batches added (norm 1.03)
  cause: nothing cleared these gradients after the update before
  fix: call optimizer.zero_grad() after optimizer.step()

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step 'body', optimizer step 'head', zero grad
        full batch   zero grad, backward, optimizer step 'body', optimizer step 'head', zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio  cosine
  2.weight   1.002       2.192        2.187  0.9985
  2.bias     0.2501      0.752        3.006  1""",
}


def _case(cleared: tuple[str, ...], *, set_to_none: bool = True) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        body, head = (torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 2))
        return TrainingSetup(model, {"body": body, "head": head})

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                for name in cleared:
                    setup.optimizers[name].zero_grad(set_to_none=set_to_none)
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {"of all optimizers": _case(()), "of one of two": _case(("body",))}


def healthy() -> dict[str, dict[str, Any]]:
    return {"of all optimizers": _case(("body", "head")), "of one of two": _case(("body", "head"))}


def near_misses() -> dict[str, dict[str, Any]]:
    def make_first(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if setup.step_index % k == 0:
                setup.model.zero_grad()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
            return loss

        return step

    def make_functional(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            parameters = list(setup.model.parameters())
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            first = setup.step_index % k == 0
            for parameter, grad in zip(parameters, torch.autograd.grad(loss / k, parameters), strict=True):
                parameter.grad = grad if first else parameter.grad + grad
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
            return loss

        return step

    both = ("body", "head")
    return {
        "cleared before the first micro-batch": _case(both) | {"make_step": make_first},
        "zeros instead of None": _case(both, set_to_none=False),
        "autograd.grad, assigned in the first micro-batch": _case(both) | {"make_step": make_functional},
    }
