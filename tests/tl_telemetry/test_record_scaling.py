from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tl_core import TrainingSetup
from tl_telemetry import observe


def scalar_model(**values):
    """Return a module with one named parameter of the given values each."""
    module = nn.Module()
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(torch.tensor(value)))
    return module


def setup_of(model, optimizers, **parts):
    return TrainingSetup(model, optimizers, **parts)


def kinds(record):
    return [event.kind for event in record.events]


def test_a_skipped_update_of_a_scaler():
    """An overflow is no update: the scale falls, and unscaled norms are shown for the steps that ran."""
    model = scalar_model(a=[1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    with observe(setup) as run:
        for factor in (1.0, math.inf):
            with run.step() as step:
                setup.optimizer.zero_grad()
                loss = 3 * model.a[0] + 4 * model.a[1]
                scaler.scale(loss * factor).backward()
                scaler.step(setup.optimizer)
                scaler.update()
                step.loss = loss
    first, second = run.records
    assert (first.loss_scale, second.loss_scale) == (8.0, 4.0)
    assert (first.skipped, second.skipped) == (False, True)
    assert first.grad_norm == first.grad_norm_before_clip == {"optimizer": pytest.approx(5.0)}
    assert second.grad_norm == {}
    assert kinds(second) == ["zero_grad", "backward", "unscale", "skipped_step", "scaler_update"]


def test_scaled_gradients_are_shown_unscaled_at_a_clip():
    """Clipping before unscale_ clips scaled gradients: the norm before is shown divided by the scale."""
    model = scalar_model(a=[1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    with observe(setup) as run, run.step():
        scaler.scale(3 * model.a[0] + 4 * model.a[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(setup.optimizer)
        scaler.update()
    (record,) = run.records
    assert record.grad_norm_before_clip == {"optimizer": pytest.approx(5.0)}
    assert record.grad_norm == {"optimizer": pytest.approx(1 / 8, rel=1e-5)}


def test_a_step_past_the_scaler_is_shown_with_the_norms_it_had():
    """Nothing divides the gradients of a direct step: the norm before a clip is shown as it was, like that after it."""
    model = scalar_model(a=[1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    with observe(setup) as run, run.step():
        scaler.scale(3 * model.a[0] + 4 * model.a[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        setup.optimizer.step()
    (record,) = run.records
    assert record.grad_norm_before_clip == {"optimizer": pytest.approx(40.0)}
    assert record.grad_norm == {"optimizer": pytest.approx(1.0)}


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_fused_optimizer_with_a_scaler(factor):
    """A fused optimizer gets scaled gradients and skips an overflow itself: neither shows in the figures."""
    model = scalar_model(a=[1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), scaler=scaler)
    with observe(setup) as run, run.step():
        scaler.scale((3 * model.a[0] + 4 * model.a[1]) * factor).backward()
        scaler.step(setup.optimizer)
        scaler.update()
    (record,) = run.records
    skipped = factor == math.inf
    assert record.optimizer_steps == {"optimizer": 0 if skipped else 1}
    assert record.skipped is skipped
    assert record.update_norm == {"optimizer": 0.0 if skipped else pytest.approx(5.0)}
    if not skipped:
        assert record.grad_norm == {"optimizer": pytest.approx(5.0)}


def test_a_flop_counter_around_the_loop_is_no_obstacle():
    """A dispatch mode is handed plain numbers for what losses are divided by; factors are read all the same."""
    model = scalar_model(a=[1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    with FlopCounterMode(display=False), observe(setup) as run, run.step():
        scaler.scale((3 * model.a[0] + 4 * model.a[1]) / 4).backward()
        scaler.step(setup.optimizer)
        scaler.update()
    backward = run.records[0].events[0]
    assert [(term.scaler, term.factors) for term in backward.terms] == [("scaler", (0.25,))] * len(backward.terms)
    assert run.records[0].grad_norm == {"optimizer": pytest.approx(5 / 4)}
