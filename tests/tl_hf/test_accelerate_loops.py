"""Loops written by hand around an Accelerator, watched: no false alarm, and mistakes by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tl_core import CheckFailed, TrainingSetup
from tl_telemetry import TrainingRun, observe

MISSING = """\
[missing-zero-grad] the gradients that 'optimizer' stepped with still held those of its earlier updates (11 of 12 \
updates, steps 1-11): at step 11 a norm of 41 was left over when backward() added to it, and the sum had a norm of 45.8
  cause: nothing cleared them between an update and the next backward(), which adds to what it finds
  fix: call zero_grad() once an update, before backward() or after step()"""


@dataclass
class Loop:
    """What a loop around an Accelerator uses: everything prepared, and the setup to be watched."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    setup: TrainingSetup


def make_loop(held: str, accumulation_steps: int = 1) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
    inputs = torch.randn(24, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    setup = {
        "raw": lambda: TrainingSetup(model, optimizer, scheduler),
        "prepared": lambda: TrainingSetup(*prepared[:3]),
        "both": lambda: TrainingSetup(model, prepared[1], scheduler),
    }[held]()
    return Loop(accelerator, *prepared, setup)


@contextmanager
def no_step(batch: Any) -> Iterator[Any]:
    yield type("Nothing", (), {})()


def train(loop: Loop, run: TrainingRun, *, in_steps: bool, update: Callable[[Loop, bool], None]) -> None:
    for _ in range(2):
        for inputs, targets in loop.loader:
            with (run.step if in_steps else no_step)((inputs, targets)) as current:
                with loop.accelerator.accumulate(loop.model):
                    loss = nn.functional.mse_loss(loop.model(inputs), targets)
                    loop.accelerator.backward(loss)
                    update(loop, loop.accelerator.sync_gradients)
                current.loss = loss


def documented(loop: Loop, syncs: bool) -> None:
    if syncs:
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 10.0)
    loop.optimizer.step()
    loop.scheduler.step()
    loop.optimizer.zero_grad()


def watched(
    held: str, accumulation_steps: int = 1, *, in_steps: bool = True, update: Callable[[Loop, bool], None] = documented
) -> TrainingRun:
    loop = make_loop(held, accumulation_steps)
    with observe(loop.setup) as run:
        train(loop, run, in_steps=in_steps, update=update)
    return run


@pytest.mark.parametrize("held", ["raw", "prepared", "both"])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
@pytest.mark.parametrize("in_steps", [True, False])
def test_the_documented_loop_is_healthy(held, accumulation_steps, in_steps):
    """prepare, accumulate, backward, clip_grad_norm_: nothing to find or to note, whichever objects the setup holds."""
    run = watched(held, accumulation_steps, in_steps=in_steps)
    assert str(run.report) == "Training run: passed"
    # the last group of each of two epochs of 6 micro-batches is stepped too
    assert sum(record.optimizer_steps["optimizer"] for record in run.records) == 2 * -(-6 // accumulation_steps)
    assert len(run.records) == (12 if in_steps else 2 * -(-6 // accumulation_steps))


@pytest.mark.parametrize("held", ["raw", "prepared", "both"])
def test_each_update_is_seen_once(held):
    """A wrapper and what it wraps are one optimizer and one scheduler: a step through both is one step."""
    events = [event.kind for event in watched(held).records[0].events]
    assert events == ["backward", "clip", "optimizer_step", "zero_grad", "scheduler_step"]


def without_zero_grad(loop: Loop, syncs: bool) -> None:
    loop.optimizer.step()
    loop.scheduler.step()


def scheduler_twice(loop: Loop, syncs: bool) -> None:
    documented(loop, syncs)
    loop.scheduler.step()


def clip_after_step(loop: Loop, syncs: bool) -> None:
    loop.optimizer.step()
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.scheduler.step()
    loop.optimizer.zero_grad()


def scheduler_first(loop: Loop, syncs: bool) -> None:
    loop.scheduler.step()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch sees one of them too
@pytest.mark.parametrize("held", ["raw", "prepared", "both"])
@pytest.mark.parametrize(
    ("update", "rule"),
    [
        (without_zero_grad, "missing-zero-grad"),
        (scheduler_twice, "scheduler-too-often"),
        (clip_after_step, "clip-after-step"),
        (scheduler_first, "scheduler-before-optimizer"),
    ],
)
def test_mistakes_have_their_names(held, update, rule):
    """What is wrong around the wrapped optimizer is found as it is around a plain one."""
    run = watched(held, update=update)
    assert rule in [finding.rule for finding in (*run.findings, *run.notes)]


def test_a_mistake_around_a_wrapped_optimizer_in_whole():
    """The message is that of any loop."""
    assert list(map(str, watched("prepared", update=without_zero_grad).findings)) == [MISSING]


@pytest.mark.parametrize("held", ["raw", "prepared", "both"])
def test_calls_of_a_wrapped_scheduler_are_counted(held):
    """A schedule that runs twice too fast is told with its calls."""
    run = watched(held, update=scheduler_twice)
    with pytest.raises(CheckFailed) as caught:
        run.assert_lr(lambda step: 1e-2 / (1 + step))
    assert caught.value.findings[0].cause == (
        "the schedule runs 2 times too fast: scheduler.step() is called 2 times a step (24 calls in 12 steps), in "
        "every micro-batch or in two places, or the expectation counts a larger unit"
    )


@pytest.mark.parametrize("held", ["raw", "prepared", "both"])
@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_a_scheduler_that_waits_in_micro_batches_does_not_step(held, accumulation_steps):
    """accelerate raises its _step_count in them, so that torch does not warn; its rate stays."""
    run = watched(held, accumulation_steps)
    steps = [event for record in run.records for event in record.events if event.kind == "scheduler_step"]
    assert sum(event.count for event in steps) == sum(record.optimizer_steps["optimizer"] for record in run.records)
