"""More updates in a cycle than with the full batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "at the end of an epoch": """\
Gradient accumulation: failed, 1 finding

[extra-update] optimizer 'optimizer' made 2 updates in cycle 2 of 2, and 1 with the full batch
  cause: it steps 2 times after the last micro-batch: two conditions are true there (the end of a group and the end \
of an epoch), or one call of step() is left over
  fix: step once after the last micro-batch of a group, also where an epoch ends with it: `if end_of_group or \
end_of_epoch`

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward
  5     2 of 4       backward
  6     3 of 4       backward
  7     4 of 4       backward, optimizer step, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "in every cycle": """\
Gradient accumulation: failed, 1 finding

[extra-update] optimizer 'optimizer' made 2 updates in cycle 1 of 2, and 1 with the full batch
  cause: it steps 2 times after the last micro-batch: two conditions are true there (the end of a group and the end \
of an epoch), or one call of step() is left over
  fix: step once after the last micro-batch of a group, also where an epoch ends with it: `if end_of_group or \
end_of_epoch`

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
}


EPOCH = 8  # micro-batches


def _case(at_end: Callable[[TrainingSetup, int], bool], **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
            if at_end(setup, k):  # what is left over
                setup.optimizer.step()
            if (setup.step_index + 1) % k == 0 or at_end(setup, k):
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step, **options}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "at the end of an epoch": _case(lambda setup, k: setup.step_index + 1 == EPOCH),
        "in every cycle": _case(lambda setup, k: k > 1 and (setup.step_index + 1) % k == 0),
    }


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "at the end of an epoch": _case(
            lambda setup, k: setup.step_index + 1 == EPOCH and (setup.step_index + 1) % k > 0
        ),
        "in every cycle": _case(lambda setup, k: k > 1 and (setup.step_index + 1) % k > k),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_twice(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    def make_lookahead(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                setup.optimizer.step()  # nothing to apply
            return loss

        return step

    plain = _case(lambda setup, k: False)
    return {
        "two steps an update, with the full batch too": {**plain, "make_step": make_twice},
        "a second step() after zero_grad()": {**plain, "make_step": make_lookahead},
    }
