"""Micro-batches that no backward pass is called for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "in the update's branch": """\
Gradient accumulation: failed, 1 finding

[micro-batch-without-backward] cycle 1 of 2: no backward pass in micro-batches 1, 2 and 3 of 4 reached these \
parameters: the accumulated gradients are those of micro-batch 4 of 4 alone (norm 0.409 instead of 1.62)
  cause: undecided: backward() is called under a condition that is not true there, or the forward pass runs under \
no_grad() there (meant for no_sync())
  fix: run the forward pass with gradients and call backward() in every micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       nothing
  2     3 of 4       nothing
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
    "under no_grad()": """\
Gradient accumulation: failed, 1 finding

[micro-batch-without-backward] cycle 1 of 2: no backward pass in micro-batches 1, 2 and 3 of 4 reached these \
parameters: the accumulated gradients are those of micro-batch 4 of 4 alone (norm 0.409 instead of 1.62)
  cause: undecided: backward() is called under a condition that is not true there, or the forward pass runs under \
no_grad() there (meant for no_sync())
  fix: run the forward pass with gradients and call backward() in every micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       nothing
  2     3 of 4       nothing
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.2038       0.2166  0.6553
  0.bias     0.2665      0.104        0.3904  0.8259
  2.weight   1.192       0.2733       0.2292  0.8787
  2.bias     0.5018      0.201        0.4005  1""",
    "all but the first": """\
Gradient accumulation: failed, 1 finding

[micro-batch-without-backward] cycle 1 of 2: no backward pass in micro-batch 1 of 4 reached these parameters: the \
accumulated gradients are those of micro-batches 2, 3 and 4 of 4 alone (norm 1.57 instead of 1.62)
  cause: undecided: backward() is called under a condition that is not true there, or the forward pass runs under \
no_grad() there (meant for no_sync())
  fix: run the forward pass with gradients and call backward() in every micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.9408      0.8683       0.9229  0.9938
  0.bias     0.2665      0.3057       1.147   0.9872
  2.weight   1.192       1.121        0.9407  0.9978
  2.bias     0.5018      0.6059       1.207   1""",
    "none at all": """\
Gradient accumulation: failed, 1 finding

[micro-batch-without-backward] cycle 1 of 2: no backward pass ran in 4 micro-batches, so that the optimizer had \
nothing to apply (the full batch's gradients have a norm of 1.62)
  cause: the condition under which backward() is called was true in none of them
  fix: call backward() in every micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       nothing
  1     2 of 4       nothing
  2     3 of 4       nothing
  3     4 of 4       optimizer step
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio
  0.weight   0.9408      0            0
  0.bias     0.2665      0            0
  2.weight   1.192       0            0
  2.bias     0.5018      0            0""",
    "the second of two": """\
Gradient accumulation: failed, 1 finding

[micro-batch-without-backward] cycle 1 of 2: the full batch's update is made of what backward() at \
micro_batch_without_backward.py:173 added, and that pass did not run in micro-batches 1, 2 and 3 of 4: what backward() \
at micro_batch_without_backward.py:166 added there is cleared before the update (gradients of norm 0.49 instead of 1.9)
  cause: the last backward pass of the step (with the weights perturbed, as in SAM) runs in some micro-batches only
  fix: keep the group's micro-batches, and run the last pass on each of them before the step

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, zero grad, backward, optimizer step, zero grad
        full batch   backward, zero grad, backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   1.03        0.2362       0.2293  0.672
  0.bias     0.3844      0.1266       0.3294  0.9381
  2.weight   1.362       0.3169       0.2326  0.8711
  2.bias     0.7497      0.2606       0.3476  1""",
}

Step = Callable[[TrainingSetup, Any], Any]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(ends: Callable[[TrainingSetup, int], bool], *, no_grad: bool = False, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            with torch.set_grad_enabled(ends(setup, k) or not no_grad):
                loss = (setup.model(batch[0]) - batch[1]).square().mean()
            if ends(setup, k):
                (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _sharpness_aware(*, whole_group: bool) -> dict[str, Any]:
    """Return a loop that steps by the gradients at weights that are moved up along the first pass's gradients."""

    def make_step(k: int) -> Step:
        group: list[Any] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            group.append(batch)
            if len(group) == k:
                moves = [0.1 * parameter.grad for parameter in setup.model.parameters()]
                _move(setup, moves, 1.0)
                setup.optimizer.zero_grad()
                for inputs, targets in group if whole_group else group[-1:]:
                    ((setup.model(inputs) - targets).square().mean() / k).backward()
                _move(setup, moves, -1.0)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                group.clear()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _move(setup: TrainingSetup, moves: list[torch.Tensor], factor: float) -> None:
    with torch.no_grad():
        for parameter, move in zip(setup.model.parameters(), moves, strict=True):
            parameter += factor * move


def _last(setup: TrainingSetup, k: int) -> bool:
    return (setup.step_index + 1) % k == 0


def _always(setup: TrainingSetup, k: int) -> bool:
    return True


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "in the update's branch": _case(_last),
        "under no_grad()": _case(_last, no_grad=True),
        "all but the first": _case(lambda setup, k: k == 1 or setup.step_index % k > 0),
        "none at all": _case(lambda setup, k: k == 1),
        "the second of two": _sharpness_aware(whole_group=False),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "in the update's branch": _case(_always),
        "under no_grad()": _case(_always, no_grad=True),
        "all but the first": _case(lambda setup, k: True),
        "none at all": _case(_always),
        "the second of two": _sharpness_aware(whole_group=True),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_summed(k: int) -> Step:
        kept: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            kept.append(loss)
            if len(kept) == k:
                (torch.stack(kept).sum() / k).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                kept.clear()
            return loss

        return step

    def make_gathered(k: int) -> Step:
        kept: list[Any] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            kept.append(batch)
            if len(kept) < k:
                return torch.zeros(())
            x, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
            loss = (setup.model(x) - y).square().mean()
            loss.backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            kept.clear()
            return loss

        return step

    def make_two(k: int) -> Step:
        # the second loss is over the whole group, and called once
        kept: list[torch.Tensor] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            output = setup.model(batch[0])
            loss = (output - batch[1]).square().mean()
            (loss / k).backward(retain_graph=True)
            kept.append(output.mean() / k)
            if len(kept) == k:
                torch.stack(kept).sum().square().backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                kept.clear()
            return loss

        return step

    plain = _case(_always)
    return {
        "one backward() over all losses": plain | {"make_step": make_summed},
        "one forward pass over all micro-batches": plain | {"make_step": make_gathered},
        "a second loss over the whole group": plain | {"make_step": make_two},
    }
