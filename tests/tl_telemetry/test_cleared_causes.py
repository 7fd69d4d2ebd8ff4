"""Gradients that are cleared before an update could apply them: all of them or a part, and by what order of acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tl_core import Finding, Report, TrainingSetup
from tl_telemetry import observe, run_training

mse = nn.functional.mse_loss


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def report_of(make_setup: Callable[[], Any], step: Callable[..., Any], steps: int = 4) -> Report:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return run_training(make_setup, data, step, steps=steps).report


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def small():
    model = nn.Linear(4, 1)
    return model, sgd(model.parameters())


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)


def make_setup(optimizer=sgd):
    model = Heads()
    return TrainingSetup(model, optimizer(model.parameters()))


def loss_of(setup, head, batch):
    return mse(getattr(setup.model, head)(setup.model.encoder(batch[0])), batch[1])


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def seen(what: str, line: str, updates: str) -> str:
    return (
        f"the gradients of a.* (2 tensors) were {what} when 'optimizer' stepped, although the backward pass at {line} "
        f"had filled them ({updates}): no update applied them, while 4 other parameters had theirs"
    )


def line_of(finding: Finding) -> str:
    """Return the line of code that a finding names."""
    return next(word for word in finding.seen.split() if word.startswith("test_cleared_causes.py:"))


@pytest.mark.parametrize(("set_to_none", "what"), [(True, "None"), (False, "0 in every element")])
def test_cleared_between_two_losses(set_to_none, what) -> None:
    """What the second loss's zero_grad() takes from the first is named, down to the parameters."""

    def step(setup, batch):
        for head in "ab":
            setup.optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(setup, head, batch)
            loss.backward()
        setup.optimizer.step()
        return loss

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    finding = only(report_of(lambda: make_setup(adamw), step))
    assert finding.rule == "zeroed-before-step"
    assert finding.seen == seen(what, line_of(finding), "4 of 4 updates, steps 0-3")
    assert finding.parameters == ("a.weight", "a.bias")
    assert finding.cause == (
        "they were cleared between this backward pass and step(), by a zero_grad() that another backward pass follows"
    )
    assert finding.fix == "call zero_grad() once an update, before its first backward()"


def after_step(setup, batch):
    setup.optimizer.zero_grad()
    loss_of(setup, "b", batch).backward()
    setup.optimizer.step()
    loss = loss_of(setup, "a", batch)
    loss.backward()
    return loss


def test_a_loss_after_the_step() -> None:
    """A backward pass after the step is told from one before it by the step of the run in which it ran."""
    finding = only(report_of(make_setup, after_step))
    assert finding.seen == seen("None", line_of(finding), "3 of 4 updates, steps 1-3")
    assert finding.cause == (
        "this backward pass runs after step(), and the next zero_grad() clears what it made before another update"
    )
    assert finding.fix == "call this backward() before step(), or add its loss to the other one"


def test_a_loss_after_the_step_in_a_loop_that_tells_of_no_steps() -> None:
    """Without steps the order of acts does not tell the two apart: both are named."""
    setup = make_setup()
    with observe(setup) as run:
        for index in range(4):
            after_step(setup, data(index))
    finding = only(run.report)
    assert finding.cause == (
        "undecided: they were cleared between this backward pass and step(), by a zero_grad() that another backward "
        "pass follows, or this backward pass runs after step(), and the next zero_grad() clears what it made before "
        "another update"
    )
    assert finding.fix == "call zero_grad() once an update, before its first backward(), and all of them before step()"


def test_parts_that_are_cleared_on_purpose() -> None:
    """Clearing a part of what a pass made, or all of it once, is a choice."""

    def last_layer_held(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, "a", batch) + loss_of(setup, "b", batch)
        loss.backward()
        setup.model.a.zero_grad()
        setup.optimizer.step()
        return loss

    def cleared_at_first(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, "a", batch)
        loss.backward()
        if setup.step_index < 2:
            setup.optimizer.zero_grad()
        loss_of(setup, "b", batch).backward()
        setup.optimizer.step()
        return loss

    for step in (last_layer_held, cleared_at_first):
        assert report_of(make_setup, step).ok


def test_step_before_backward() -> None:
    """A step that comes before the backward pass is told from a zero_grad() in the wrong place."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = mse(setup.model(batch[0]), batch[1])
        setup.optimizer.step()
        loss.backward()
        return loss

    finding = only(report_of(small, step))
    assert finding.seen == (
        "the gradients of all 2 parameters were None when 'optimizer' stepped, although a backward pass had filled "
        "them in the step before (3 of 4 updates, steps 1-3)"
    )
    assert finding.cause == (
        "step() comes before backward(): the next step's zero_grad() clears what a backward pass makes before step() "
        "is called again"
    )
    assert finding.fix == "call step() after backward() and before the next zero_grad()"


def test_cleared_at_the_end_of_a_cycle() -> None:
    """Passes of earlier steps do not make a cycle's wrong end a step before its backward pass."""

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        if setup.step_index % 2:
            setup.optimizer.zero_grad()
            setup.optimizer.step()
        return loss

    finding = only(report_of(small, step, steps=6))
    assert finding.fix == "move zero_grad() before backward(), or after step()"
