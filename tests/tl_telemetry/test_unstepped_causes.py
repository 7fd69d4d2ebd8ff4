"""Optimizers that never step, or step in vain: why, and where a run does not tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tl_core import Report, TrainingSetup
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


def parts(**modules):
    """Build a setup with one optimizer a part."""
    return TrainingSetup(nn.ModuleDict(modules), {name: sgd(module.parameters()) for name, module in modules.items()})


def test_a_run_shorter_than_its_accumulation_cycle_is_not_judged() -> None:
    """Gradients that nothing cleared may still be waiting for their update; an optimizer that cleared them is not."""

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        (loss / 8).backward()
        if setup.step_index % 8 == 7:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss

    def cleared(setup, batch):
        setup.optimizer.zero_grad()
        return step(setup, batch)

    report = report_of(small, step)
    assert (report.findings, report.judged) == ((), False)
    assert report.notes[0].seen == (
        "no optimizer stepped in 4 steps, and the gradients still hold all 4 backward passes: what an update shows "
        "could not be judged"
    )
    (finding,) = report_of(small, cleared).findings
    assert finding.rule == "never-stepped"


def test_an_optimizer_that_steps_in_another_ones_stead() -> None:
    """The wrong optimizer's second step is named, and what it leaves over in its own gradients is no other mistake."""

    def make_setup():
        return parts(maker=nn.Linear(4, 4), judge=nn.Linear(4, 1))

    def loop(second):
        def step(setup, batch):
            made = setup.model["maker"](batch[0])
            setup.optimizers["judge"].zero_grad()
            mse(setup.model["judge"](made.detach()), batch[1]).backward()
            setup.optimizers["judge"].step()
            setup.optimizers["maker"].zero_grad()
            loss = setup.model["judge"](made).mean()
            loss.backward()
            setup.optimizers[second].step()
            return loss

        return step

    (finding,) = report_of(make_setup, loop("judge")).findings
    assert finding.rule == "never-stepped"
    assert finding.seen == (
        "'maker' never stepped in 4 steps, although 4 backward passes gave gradients to maker.* (2 tensors); nothing "
        "else moved them"
    )
    site = finding.cause.split("(")[1].split(")")[0]
    assert site.startswith("test_unstepped_causes.py:")
    assert finding.cause == f"after the backward pass that fills them ({site}), 'judge' is stepped, not 'maker'"
    assert finding.fix == "call step() on 'maker' there, instead of 'judge'"
    assert report_of(make_setup, loop("maker")).ok


@pytest.mark.parametrize(("stepped", "found"), [(["head"], ["never-stepped"]), (["head", "encoder"], [])])
def test_an_optimizer_that_a_scaler_never_steps(stepped, found) -> None:
    """Overflows in the first steps excuse no optimizer whose turn comes in none of the others."""

    def make_setup():
        setup = parts(encoder=nn.Linear(4, 8), head=nn.Linear(8, 1))
        setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        return setup

    def step(setup, batch):
        setup.model.zero_grad()
        loss = mse(setup.model["head"](setup.model["encoder"](batch[0])), batch[1])
        setup.scaler.scale(loss).backward()
        if setup.step_index < 2:
            setup.model["head"].weight.grad[0, 0] = float("inf")
        for name in stepped:
            setup.scaler.step(setup.optimizers[name])
        setup.scaler.update()
        return loss

    assert [finding.rule for finding in report_of(make_setup, step, steps=8).findings] == found


def test_an_optimizer_that_a_scaler_always_keeps_from_stepping() -> None:
    """Overflows in every step are the scaler's matter, not a step() that is missing."""

    def make_setup():
        setup = parts(encoder=nn.Linear(4, 8), head=nn.Linear(8, 1))
        setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        return setup

    def step(setup, batch):
        setup.model.zero_grad()
        loss = mse(setup.model["head"](setup.model["encoder"](batch[0])), batch[1])
        setup.scaler.scale(loss).backward()
        setup.model["encoder"].weight.grad[0, 0] = float("inf")
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
        setup.scaler.update()
        return loss

    assert "never-stepped" not in {finding.rule for finding in report_of(make_setup, step).findings}


def test_an_observed_loop_without_steps_and_updates() -> None:
    """Backward passes alone are judged too, where nobody says when a step ends and no update does."""
    setup = TrainingSetup(*small())
    with observe(setup) as run:
        for index in range(3):
            setup.optimizer.zero_grad()
            mse(setup.model(data(index)[0]), data(index)[1]).backward()
    (finding,) = run.findings
    assert finding.seen == (
        "'optimizer' never stepped in this run, although 3 backward passes gave gradients to all 2 parameters; nothing "
        "else moved them"
    )
    assert finding.fix == "call step() on 'optimizer'"
    assert len(run.records) == 1


def test_frozen_by_the_loop_and_never_set_back() -> None:
    """A part that the loop freezes for another one's turn, and leaves frozen, has an optimizer that steps in vain."""

    def loop(back):
        def step(setup, batch):
            maker, judge = setup.model["maker"], setup.model["judge"]
            maker.requires_grad_(False)
            for name in ("judge", "maker"):
                setup.optimizers[name].zero_grad()
                loss = mse(judge(maker(batch[0])), batch[1])
                loss.backward()
                setup.optimizers[name].step()
                maker.requires_grad_(back)
            return loss

        return step

    def make_setup():
        return parts(maker=nn.Linear(4, 4), judge=nn.Linear(4, 1))

    assert str(report_of(make_setup, loop(back=False)).findings[0]) == (
        "[step-without-gradient] 'maker' stepped 4 times (steps 0-3), never with a gradient: it holds maker.* (2 "
        "tensors)\n"
        "  cause: the loop froze them (requires_grad_(False)) in step 0, as for another optimizer's turn, and never "
        "set them back\n"
        "  fix: set requires_grad_(True) again before the forward pass whose gradients 'maker' steps with; if its "
        "turn only comes after this run, freeze it before the loop begins"
    )
    assert report_of(make_setup, loop(back=True)).ok
