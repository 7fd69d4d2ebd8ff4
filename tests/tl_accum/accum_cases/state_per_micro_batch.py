"""What is kept beside the weights, and moves otherwise than once an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "an average, in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.state['ema'] (dict) moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 2 of 2; with the \
full batch, it moved once; 0.weight moved by 0.0152 instead of 0.00657
  cause: it is updated in every micro-batch instead of after each update
  fix: update it once an update, in the branch where the optimizer steps

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "an average, by another factor": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.state['ema'] (dict) moved in micro-batch 4 of 4 of cycle 1 of 2; with the full batch, \
it moved once; 0.weight moved by 0.0136 instead of 0.00394
  cause: undecided: its update uses another factor (a decay that depends on the step's index, which counts \
micro-batches, or on the accumulation steps)
  fix: compute what its update uses from the number of updates

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "an average, by a factor that counts micro-batches": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.state['ema'] (dict) moved in micro-batch 4 of 4 of cycle 1 of 3; with the full batch, \
it moved once; 0.weight moved by 0.0273 instead of 0.0355
  cause: undecided: its update uses another factor (a decay that depends on the step's index, which counts \
micro-batches, or on the accumulation steps)
  fix: compute what its update uses from the number of updates

What acted in cycle 1 of 3:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "an average that stands still": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.state['ema'] (dict) did not move in cycle 1 of 2; with the full batch, it moved once; \
0.weight moved by 0 instead of 0.00394
  cause: it is not updated with accumulation
  fix: update it once an update, in the branch where the optimizer steps

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "an average, in two micro-batches": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.state['ema'] (dict) moved in micro-batches 2 and 4 of 4 of cycle 2 of 2; with the full \
batch, it moved once; 0.weight moved by 0.00976 instead of 0.00657
  cause: it is updated in micro-batches that make no update
  fix: update it once an update, in the branch where the optimizer steps

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "a momentum by hand": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] setup.momentum moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 1 of 2; with the full \
batch, it moved once; by 4.38 instead of 2.08
  cause: it is updated in every micro-batch instead of after each update
  fix: update it once an update, in the branch where the optimizer steps

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "an average that the model keeps in an attribute": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] what modules keep in attributes moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 2 of 2; \
with the full batch, it moved once; average.weight moved by -0.0831 instead of -0.0349
  cause: it is updated in every micro-batch instead of after each update
  fix: update it once an update, in the branch where the optimizer steps

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "a weight of the loss": """\
Gradient accumulation: failed, 1 finding

[state-per-micro-batch] cycle 1 of 2: setup.weight changed in micro-batches 1, 2, 3 and 4 of 4, and the gradients \
depend on it: norm 2.13 instead of 3.6, and equal to the full batch's when it is put back before each micro-batch
  cause: it is updated in every micro-batch instead of after each update, so that the micro-batches of one group are \
computed with different values of it
  fix: update it once a group, after optimizer.step(); or compute it from the number of updates

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  weight     3.48        2.083        0.5985  0.9981
  bias       0.9404      0.4398       0.4676  1""",
}

Step = Callable[[TrainingSetup, Any], Any]


Decay = Callable[[int, int], float]


def _case(due: Callable[[int, int], bool], decay: Decay = lambda index, k: 0.9, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        ema = {name: value.clone() for name, value in model.state_dict().items()}
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state={"ema": ema})

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if due(setup.step_index, k):
                for name, value in setup.model.state_dict().items():
                    setup.state["ema"][name].lerp_(value, 1.0 - decay(setup.step_index, k))
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step} | options


def _last(index: int, k: int) -> bool:
    return (index + 1) % k == 0


def _momentum(*, every: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.momentum = torch.zeros_like(model.weight)
        return setup

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            due = _last(setup.step_index, k)
            if every or due:
                setup.momentum.mul_(0.9).add_(setup.model.weight.grad)
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


class _Averaging(nn.Linear):
    """A layer that keeps an average of its weights out of torch's sight, and a running loss beside it."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.average = {name: value.detach().clone() for name, value in self.named_parameters()}
        self.running = torch.zeros(1)

    def follow(self) -> None:
        for name, value in self.named_parameters():
            self.average[name].lerp_(value.detach(), 0.1)


def _kept_by_model(*, every: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _Averaging()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            setup.model.running.lerp_(loss.detach().reshape(1), 0.1)
            due = _last(setup.step_index, k)
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if every or due:
                setup.model.follow()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def _weighed(*, every: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.weight, setup.total = 1.0, 0.0
        return setup

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (setup.weight * loss / k).backward()
            setup.total += float(loss) / k
            due = _last(setup.step_index, k)
            if every or due:
                setup.weight = 1.0 / (1.0 + setup.total)
            if due:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                setup.total = 0.0
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "an average, in every micro-batch": _case(lambda index, k: True),
        "an average, by another factor": _case(_last, lambda index, k: 0.9 if k == 1 else 0.9**k),
        "an average, by a factor that counts micro-batches": _case(
            _last, lambda index, k: min(0.99, (1 + index) / (10 + index)), cycles=3
        ),
        "an average that stands still": _case(lambda index, k: k == 1),
        "an average, in two micro-batches": _case(lambda index, k: (index + 1) % max(k // 2, 1) == 0),
        "a momentum by hand": _momentum(every=True),
        "an average that the model keeps in an attribute": _kept_by_model(every=True),
        "a weight of the loss": _weighed(every=True),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "an average, in every micro-batch": _case(_last),
        "an average, by another factor": _case(_last, lambda index, k: 0.9),
        "an average, by a factor that counts micro-batches": _case(
            _last, lambda index, k: min(0.99, (1 + index // k) / (10 + index // k)), cycles=3
        ),
        "an average that stands still": _case(lambda index, k: k == 1 or _last(index, k)),
        "an average, in two micro-batches": _case(lambda index, k: (index + 1) % max(k, 1) == 0),
        "a momentum by hand": _momentum(every=False),
        "an average that the model keeps in an attribute": _kept_by_model(every=False),
        "a weight of the loss": _weighed(every=False),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def averaged() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01), state={"ema": ema})

    def with_model(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if _last(setup.step_index, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                setup.state["ema"].update_parameters(setup.model)
            return loss

        return step

    def metered(k: int) -> Step:
        # a running loss and counters move in every micro-batch, as they should
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            meter = setup.state.setdefault("meter", {"loss": torch.zeros(()), "seen": 0})
            meter["loss"] += loss.detach()
            meter["seen"] += len(batch[0])
            if _last(setup.step_index, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    plain = _case(_last)
    return {
        "an averaged model": plain | {"make_setup": averaged, "make_step": with_model, "cycles": 3},
        "a running loss": plain | {"make_step": metered},
    }
