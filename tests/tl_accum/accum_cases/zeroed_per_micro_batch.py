"""Gradients that are cleared within a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "before each backward()": """\
Gradient accumulation: failed, 1 finding

[zeroed-per-micro-batch] cycle 1 of 2: only the last of 4 micro-batches reaches the optimizer: with a norm of 0.409, \
where all of them added 1.62 together
  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batches 1, 2 and 3 of 4, before all of \
them were added up
  fix: call zero_grad() once a group: after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       zero grad, backward
  2     3 of 4       zero grad, backward
  3     4 of 4       zero grad, backward, optimizer step
        full batch   backward, optimizer step

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
    "after each backward()": """\
Gradient accumulation: failed, 1 finding

[zeroed-per-micro-batch] cycle 1 of 2: only the last of 4 micro-batches reaches the optimizer: with a norm of 0.409, \
where all of them added 1.62 together
  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batches 1, 2 and 3 of 4, before all of \
them were added up
  fix: call zero_grad() once a group: after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, zero grad
  1     2 of 4       backward, zero grad
  2     3 of 4       backward, zero grad
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
    "in the middle": """\
Gradient accumulation: failed, 1 finding

[zeroed-per-micro-batch] cycle 1 of 2: only micro-batches 3 and 4 of 4 reach the optimizer: with a norm of 1.11, \
where all of them added 1.62 together
  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batch 2 of 4, before all of them were \
added up
  fix: call zero_grad() once a group: after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       zero grad, backward
  3     4 of 4       backward, optimizer step
        full batch   backward, optimizer step

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.602        0.6399  0.934
  0.bias     0.2665      0.2194       0.8232  0.9654
  2.weight   1.192       0.8          0.6711  0.993
  2.bias     0.5018      0.4387       0.8742  1""",
    "by hand": """\
Gradient accumulation: failed, 1 finding

[zeroed-per-micro-batch] cycle 1 of 2: only the last of 4 micro-batches reaches the optimizer: with a norm of 0.409, \
where all of them added 1.62 together
  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batches 1, 2 and 3 of 4, before all of \
them were added up
  fix: call zero_grad() once a group: after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       zero grad, backward
  2     3 of 4       zero grad, backward
  3     4 of 4       zero grad, backward, optimizer step
        full batch   backward, optimizer step

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
    "of one layer": """\
Gradient accumulation: failed, 1 finding

[zeroed-per-micro-batch] cycle 1 of 2: only the last of 4 micro-batches reaches the optimizer in 0.* (2 tensors): \
with a norm of 0.229, where all of them added 0.978 together
  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batches 1, 2 and 3 of 4, before all of \
them were added up
  fix: call zero_grad() once a group: after optimizer.step(), in the same branch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       zero grad, backward
  2     3 of 4       zero grad, backward
  3     4 of 4       zero grad, backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(
    clear: Callable[[TrainingSetup, int], bool], *, after: bool = False, layer: bool = False, **options: Any
) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if not after and clear(setup, k):
                (setup.model[0] if layer else setup.optimizer).zero_grad()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                if layer:
                    setup.optimizer.zero_grad()
            if after and clear(setup, k):
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _by_hand(clear: Callable[[int, int], bool]) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            if clear(setup.step_index, k):
                for parameter in setup.model.parameters():
                    parameter.grad = None
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "before each backward()": _case(lambda setup, k: True),
        "after each backward()": _case(lambda setup, k: True, after=True),
        "in the middle": _case(lambda setup, k: setup.step_index % max(k // 2, 1) == 0),
        "by hand": _by_hand(lambda index, k: True),
        "of one layer": _case(lambda setup, k: True, layer=True),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "before each backward()": _case(lambda setup, k: setup.step_index % k == 0),
        "after each backward()": _case(lambda setup, k: (setup.step_index + 1) % k == 0, after=True),
        "in the middle": _case(lambda setup, k: setup.step_index % k == 0),
        "by hand": _by_hand(lambda index, k: index % k == 0),
        "of one layer": _case(lambda setup, k: setup.step_index % k == 0, layer=True),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_buffered(k: int) -> Step:
        # each micro-batch's gradients are moved to a buffer, and back before the update
        kept: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            setup.optimizer.zero_grad()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            own = [parameter.grad for parameter in setup.model.parameters()]
            kept[:] = [old + new for old, new in zip(kept, own, strict=True)] if kept else own
            if (setup.step_index + 1) % k == 0:
                for parameter, grad in zip(setup.model.parameters(), kept, strict=True):
                    parameter.grad = grad
                setup.optimizer.step()
                kept.clear()
            return loss

        return step

    def make_one_backward(k: int) -> Step:
        kept: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            setup.optimizer.zero_grad()
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            kept.append(loss)
            if len(kept) == k:
                (torch.stack(kept).sum() / k).backward()
                setup.optimizer.step()
                kept.clear()
            return loss

        return step

    plain = _case(lambda setup, k: setup.step_index % k == 0)
    return {
        "gradients in a buffer": plain | {"make_step": make_buffered},
        "one backward() at the end": plain | {"make_step": make_one_backward},
        "cleared before and after": _case(lambda setup, k: setup.step_index % k in (0, k), accumulation_steps=2),
    }
