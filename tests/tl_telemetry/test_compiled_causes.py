"""What happens inside of compiled code: seen by repeating the run without compiling it, where it can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tl_core import Report, TrainingSetup
from tl_telemetry import observe, run_training

REPEATED = " (seen by repeating the run without compiling it)"


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


class Net(nn.Module):
    """A network that uses its first layer, leaves it out, or detaches it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                x = self.first(x)
        elif self.how != "unused":
            x = self.first(x)
        return self.last(x.detach() if self.how == "detached" else x)


def make_setup(how: str, place: str = "outside") -> TrainingSetup:
    model = Net(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if place == "in place":
        model.compile(backend="aot_eager")
    return TrainingSetup(compiled(model) if place == "outside" else model, optimizer)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def report_of(how: str, place: str = "outside") -> Report:
    loss = compiled(loss_fn) if place == "function" else loss_fn
    return run_training(lambda: make_setup(how, place), data, loss_fn=loss, steps=4).report


@pytest.mark.parametrize("place", ["outside", "in place", "function"])
def test_a_part_that_compiled_code_does_not_call(place: str) -> None:
    """A layer that is not called is told from one that is cut off, wherever the compiled code begins."""
    report = report_of("unused", place)
    assert report.findings == ()
    assert [note.seen for note in report.notes] == [
        f"first.* (2 tensors) never got a gradient in 4 steps, and no forward pass of their module ran{REPEATED}"
    ]


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("detached", f"their forward pass ran with gradients on{REPEATED}"),
        ("no_grad", f"their forward pass ran only with gradients off{REPEATED}"),
    ],
)
def test_a_part_that_is_cut_off_in_compiled_code(how: str, seen: str) -> None:
    """A cut inside of compiled code is a finding, with what was seen of the layer."""
    (finding,) = report_of(how).findings
    assert finding.rule == "no-gradient"
    assert finding.seen == (
        f"first.* (2 tensors) never got a gradient in 4 steps, while 2 other parameters got one; {seen}"
    )


def test_a_compiled_network_that_trains() -> None:
    """Where all parameters get gradients nothing is repeated and nothing said."""
    report = report_of("used")
    assert (report.findings, report.notes) == ((), ())


def not_repeated(loop: Callable[[], Report]) -> None:
    report = loop()
    assert report.findings == ()
    assert [str(note) for note in report.notes] == [
        "[never-ran] first.* (2 tensors) never got a gradient in 4 steps; their module runs inside of compiled or "
        "scripted code\n"
        "  cause: undecided: what runs inside of such code cannot be seen. It may be unused, or cut off from the loss\n"
        "  fix: watch the loop once without compiling it: then this says which of the two it is"
    ]


def test_a_run_that_cannot_be_repeated() -> None:
    """A loop of one's own, or data that can be read only once, leaves open what happens in compiled code."""

    def observed() -> Report:
        setup = make_setup("detached")
        with observe(setup) as run:
            for index in range(4):
                with run.step():
                    setup.optimizer.zero_grad()
                    loss_fn(setup.model, data(index)).backward()
                    setup.optimizer.step()
        return run.report

    def read_once() -> Report:
        batches = iter([data(index) for index in range(4)])
        return run_training(lambda: make_setup("detached"), batches, loss_fn=loss_fn, steps=4).report

    def made_once() -> Report:
        setups = iter([make_setup("detached")])
        return run_training(lambda: next(setups), data, loss_fn=loss_fn, steps=4).report

    for loop in (observed, read_once, made_once):
        not_repeated(loop)
