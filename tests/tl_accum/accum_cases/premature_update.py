"""Updates before the last micro-batch of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGES = {
    "in every micro-batch": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped in every micro-batch: 8 updates where 2 are due (make_step(4))
  cause: it steps in each call of step(): under no condition, or one that does not count micro-batches, or not with k
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, optimizer step, zero grad
  1     2 of 4       backward, optimizer step, zero grad
  2     3 of 4       backward, optimizer step, zero grad
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "one of two optimizers": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'body' stepped in every micro-batch: 8 updates where 2 are due (make_step(4))
  cause: it steps in each call of step(): under no condition, or one that does not count micro-batches, or not with k
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, optimizer step 'body', zero grad
  1     2 of 4       backward, optimizer step 'body', zero grad
  2     3 of 4       backward, optimizer step 'body', zero grad
  3     4 of 4       backward, optimizer step 'head', zero grad, optimizer step 'body', zero grad
        full batch   backward, optimizer step 'head', zero grad, optimizer step 'body', zero grad""",
    "off by one": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped before the last micro-batch: after micro-batch 1 of 4, in each of 2 \
cycles
  cause: the condition is off by 3: an update joins the first micro-batch of a group with what the group before it \
left (the first update has nothing of the latter)
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, \
`setup.step_index % k == 0` after the first

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward, optimizer step, zero grad
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "one too early": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped before the last micro-batch: after micro-batch 3 of 4, in each of 2 \
cycles
  cause: the condition is off by 1: an update joins the first 3 micro-batches of a group with what the group before \
it left (the first update has nothing of the latter)
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, \
`setup.step_index % k == 0` after the first

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward, optimizer step, zero grad
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "a counter that is not set back": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped in every micro-batch of cycle 2 of 2 (5 updates where 2 are due), \
and after the last one before
  cause: its condition stays true once it was: a counter that an update does not set back to 0 (`seen >= k`)
  fix: set the counter back after optimizer.step(), or test its remainder: `seen % k == 0`

What acted in cycle 2 of 2:
  step  micro-batch  acts
  4     1 of 4       backward, optimizer step, zero grad
  5     2 of 4       backward, optimizer step, zero grad
  6     3 of 4       backward, optimizer step, zero grad
  7     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "counts to another number": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped before the last micro-batch of cycle 1 of 3: in micro-batch 3 of 4 \
(4 updates where 3 are due, one in every 3 micro-batches)
  cause: its condition counts to 3 instead of 4
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 3:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward, optimizer step, zero grad
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
    "twice a group": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped before the last micro-batch of cycle 1 of 2: in micro-batches 2 and \
4 of 4 (4 updates where 2 are due, one in every 2 micro-batches)
  cause: its condition counts to 2 instead of 4
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward, optimizer step, zero grad
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad""",
    "at random": """\
Gradient accumulation: failed, 1 finding

[premature-update] optimizer 'optimizer' stepped before the last micro-batch of cycle 1 of 2: in micro-batch 3 of 4 \
(3 updates where 2 are due)
  cause: its condition does not count the micro-batches of a group
  fix: look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group, with \
the k that make_step was given

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward, optimizer step, zero grad
  3     4 of 4       backward
        full batch   backward, optimizer step, zero grad""",
}


Due = Callable[[TrainingSetup, int], bool]


def _case(due: Due, **options: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.seen = 0
        return setup

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            setup.seen += 1
            if due(setup, k):
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step, **options}


def _counter(*, set_back: bool) -> Due:
    def due(setup: TrainingSetup, k: int) -> bool:
        if setup.seen < k:
            return False
        if set_back:
            setup.seen = 0
        return True

    return due


def _two_optimizers(*, body_each_time: bool) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        body = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return TrainingSetup(model, {"body": body, "head": torch.optim.Adam(model[2].parameters())})

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            (loss / k).backward()
            due = (setup.step_index + 1) % k == 0
            if due:
                setup.optimizers["head"].step()
                setup.optimizers["head"].zero_grad()
            if due or body_each_time:
                setup.optimizers["body"].step()
                setup.optimizers["body"].zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": (X, Y), "make_step": make_step}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "in every micro-batch": _case(lambda setup, k: True),
        "one of two optimizers": _two_optimizers(body_each_time=True),
        "off by one": _case(lambda setup, k: setup.step_index % k == 0),
        "one too early": _case(lambda setup, k: setup.step_index % k == max(k - 2, 0)),
        "a counter that is not set back": _case(_counter(set_back=False)),
        "counts to another number": _case(lambda setup, k: setup.seen % min(k, 3) == 0, cycles=3),
        "twice a group": _case(lambda setup, k: setup.seen % max(k // 2, 1) == 0),
        "at random": _case(lambda setup, k: k == 1 or setup.seen in (3, 5, 8)),
    }


def healthy() -> dict[str, dict[str, Any]]:
    last = _case(lambda setup, k: (setup.step_index + 1) % k == 0)
    return {
        "in every micro-batch": last,
        "one of two optimizers": _two_optimizers(body_each_time=False),
        "off by one": last,
        "one too early": _case(lambda setup, k: setup.step_index % k == k - 1),
        "a counter that is not set back": _case(_counter(set_back=True)),
        "counts to another number": _case(lambda setup, k: setup.seen % k == 0, cycles=3),
        "twice a group": _case(lambda setup, k: setup.seen % k == 0),
        "at random": _case(lambda setup, k: k == 1 or setup.seen in (4, 8)),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_gan() -> TrainingSetup:
        model = nn.ModuleDict({"gen": nn.Linear(6, 6), "disc": nn.Linear(6, 1)})
        optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
        return TrainingSetup(model, optimizers)

    def make_alternating(k: int) -> Callable[[TrainingSetup, Any], Any]:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            cycle = setup.step_index // k
            turn = "gen" if cycle % 2 else "disc"
            others = setup.model["disc" if turn == "gen" else "gen"]
            others.requires_grad_(False)
            score = setup.model["disc"](setup.model["gen"](batch[0]))
            loss = (score if turn == "gen" else score - setup.model["disc"](batch[0])).mean()
            (loss / k).backward()
            others.requires_grad_(True)
            if (setup.step_index + 1) % k == 0:
                setup.optimizers[turn].step()
                setup.optimizers[turn].zero_grad()
            return loss

        return step

    def make_skipping(k: int) -> Callable[[TrainingSetup, Any], Any]:
        # step() is called each time, and finds no gradients but at the end of a group
        kept: list[Any] = []

        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = (setup.model(batch[0]) - batch[1]).square().mean()
            kept.append(loss / k)
            if len(kept) == k:
                torch.stack(kept).sum().backward()
                kept.clear()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            return loss

        return step

    counted = _case(lambda setup, k: setup.seen % k == 0)
    return {
        "optimizers in turn, a cycle each": {
            **counted,
            "make_setup": make_gan,
            "make_step": make_alternating,
            "cycles": 4,
        },
        "step() without gradients": {**counted, "make_step": make_skipping},
        "epochs that end within a cycle, counted through": _case(
            lambda setup, k: setup.seen % k == 0, data=[(X, Y)], cycles=3
        ),
        "two micro-batches": _case(lambda setup, k: setup.seen % k == 0, accumulation_steps=2),
    }
