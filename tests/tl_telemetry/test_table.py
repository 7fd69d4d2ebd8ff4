from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import observe, run_training


def parameters_of(*values):
    module = nn.Module()
    module.list = nn.ParameterList(nn.Parameter(torch.tensor([value])) for value in values)
    return module


def train(factors, *, lr=0.5, clip=None, losses=None):
    """Train one parameter with the gradients ``factors``; the losses are the factors, or those given."""
    model = parameters_of(1.0)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))
    with observe(setup) as run:
        for index, factor in enumerate(factors):
            with run.step() as step:
                setup.optimizer.zero_grad()
                (model.list[0] * factor).sum().backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                setup.optimizer.step()
                step.loss = losses[index] if losses else factor
    return run


def test_a_short_run_is_shown_whole():
    """One row a step: losses, gradient norm before and after clipping, update, rate, steps."""
    assert train([1.0, 4.0, 0.25], clip=2.0).table() == (
        "  step  loss  grad norm  update  lr   opt steps\n"
        "  0     1     1          0.5     0.5  1\n"
        "  1     4     4 → 2      1       0.5  1\n"
        "  2     0.25  0.25       0.125   0.5  1"
    )


def test_a_long_run_is_folded_around_what_matters():
    """Ends, the largest figures and the told steps with their neighbours are shown, and ranges of the rest."""
    factors = [1.0 + index / 64 for index in range(40)]
    factors[20] = 8.0
    run = train(factors)
    assert run.table() == (
        "  step   loss            grad norm       update            lr   opt steps\n"
        "  0      1               1               0.5               0.5  1\n"
        "  1      1.016           1.016           0.5078            0.5  1\n"
        "  2-19   1.031 .. 1.297  1.031 .. 1.297  0.5156 .. 0.6484  0.5  1\n"
        "  20     8               8               4                 0.5  1\n"
        "  21-37  1.328 .. 1.578  1.328 .. 1.578  0.6641 .. 0.7891  0.5  1\n"
        "  38     1.594           1.594           0.7969            0.5  1\n"
        "  39     1.609           1.609           0.8047            0.5  1"
    )
    told = [line.split()[0] for line in run.table(around=[10]).splitlines()]
    assert told == ["step", "0", "1", "2-8", "9", "10", "11", "12-19", "20", "21-37", "38", "39"]


def test_a_fold_is_worth_it():
    """One or two rows between shown ones are shown too; a step that does not exist shows nothing."""
    run = train([1.0] * 13)
    shown = [line.split()[0] for line in run.table(around=[5, 99]).splitlines()]
    assert shown == ["step", "0", "1", "2", "3", "4", "5", "6", "7-10", "11", "12"]


def test_the_first_broken_step_is_shown():
    """A loss or a norm that is not finite is not folded away, and the rest of them show in their range."""
    losses = [1.0] * 30
    losses[12:20] = [math.nan] * 4 + [math.inf] * 4
    factors = [1.0] * 30
    factors[7] = math.nan
    lines = train(factors, losses=losses).table().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "0", "1", "2-6", "7", "8-11", "12", "13-27", "28", "29"]
    assert lines[4].split() == ["7", "1", "nan", "nan", "0.5", "1"]
    assert lines[6].split() == ["12", "nan", "1", "nan", "0.5", "1"]
    assert lines[7].startswith("  13-27  1 .. inf .. nan  1 ")


def test_cells_without_a_figure_are_dashes():
    """A step without an update or a loss has dashes; columns of dashes only are left out."""
    model = parameters_of(1.0)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with observe(setup, track_updates=False) as run:
        for index in range(2):
            with run.step() as step:
                (2 * model.list[0]).sum().backward()
                if index:
                    setup.optimizer.step()
                    step.loss = {"a": 1.0, "b": -0.5}
    assert run.table() == (
        "  step  a  b     grad norm  lr   opt steps\n"
        "  0     -  -     -          0.5  0\n"
        "  1     1  -0.5  4          0.5  1"
    )


def test_several_optimizers_have_columns_of_their_own():
    """Up to three optimizers are told apart, more are summed up; several rates stand in one cell."""

    def table(count):
        model = parameters_of(*[1.0] * count)
        optimizers = {f"o{i}": torch.optim.SGD([p], lr=2.0**-i) for i, p in enumerate(model.list)}
        setup = TrainingSetup(model, optimizers)
        with observe(setup, track_updates=False) as run, run.step():
            sum((i + 1) * p.sum() for i, p in enumerate(model.list)).backward()
            for name in list(optimizers)[1:]:
                optimizers[name].step()
        return run.table()

    assert table(2) == (
        "  step  lr o0  opt steps o0  grad norm o1  lr o1  opt steps o1\n"
        "  0     1      0             2             0.5    1"
    )
    assert table(5) == (
        "  step  grad norm all 5  lr all 5              opt steps all 5\n"
        "  0     7.348            1,0.5,0.25,0.125,...  4"
    )


def test_the_loss_scale_has_a_column():
    """With a GradScaler the scale after the step is shown."""
    model = parameters_of(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.5), scaler=scaler)
    with observe(setup) as run:
        for factor in (1.0, math.inf):
            with run.step():
                setup.optimizer.zero_grad()
                scaler.scale((factor * model.list[0]).sum()).backward()
                scaler.step(setup.optimizer)
                scaler.update()
    assert run.table() == (
        "  step  grad norm  update  lr   opt steps  scale\n"
        "  0     1          0.5     0.5  1          8\n"
        "  1     -          -       0.5  0          4"
    )


@pytest.mark.parametrize("name", ["step", "lr", "grad norm"])
def test_a_loss_may_have_the_name_of_a_column(name):
    """A loss whose name is that of another column does not disturb it, in a folded run neither."""
    run = train([1.0] * 20, losses=[{name: float(index)} for index in range(20)])
    lines = run.table().splitlines()
    assert lines[0].split("  ")[1:3] == ["step", name]
    assert lines[3].split()[:4] == ["2-17", "2", "..", "17"]


def test_a_narrow_table_leaves_out_what_is_least_needed() -> None:
    """Losses beside the main one go first, then the updates; without a width everything is shown."""

    def step(setup: TrainingSetup, x: torch.Tensor) -> dict[str, torch.Tensor]:
        setup.optimizer.zero_grad()
        loss = setup.model(x).square().mean()
        loss.backward()
        setup.optimizer.step()
        return {"loss": loss, "part": loss / 2}

    def make() -> TrainingSetup:
        model = nn.Linear(2, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run = run_training(make, torch.ones(4, 2), step, steps=2)

    def titles(width: int | None) -> list[str]:
        return re.split(r"\s{2,}", run.table(width=width).splitlines()[0].strip())

    everything = ["step", "loss", "part", "grad norm", "update", "lr", "opt steps"]
    assert titles(None) == titles(200) == everything
    needed = len(run.table().splitlines()[1])
    assert titles(needed - 1) == [title for title in everything if title != "part"]
    assert titles(10) == [title for title in everything if title not in ("part", "update")]
