"""Errors that a GradScaler raises, errors of the person's own, and the check's two faces."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import tl_amp
from tl_amp import AMP_FINDINGS, AMP_NOTES, assert_mixed_precision_training, check_mixed_precision_training
from tl_core import CheckFailed, NotJudged, TrainingSetup
from tl_telemetry import TrainingRun

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
one, two, plain, loss_of = loops.one, loops.two, loops.plain, loops.loss_of

ERRORS = {}


def loop(rule, make_setup=None):
    """Register a step that a GradScaler refuses, under the rule that explains why."""

    def register(step):
        ERRORS[step.__name__] = (rule, make_setup or one(), step)
        return step

    return register


def scaled(setup, batch):
    setup.model.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    return loss.detach()


def finish(setup, loss):
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
    setup.scaler.update()
    return loss.detach()


@loop("unscaled-twice")
def unscaled_for_the_log_and_for_the_clip(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    setup.scaler.unscale_(setup.optimizer)
    return finish(setup, loss)


@loop("unscaled-twice")
def unscaled_after_the_step(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizer)
    setup.scaler.unscale_(setup.optimizer)
    return loss


@loop("unscaled-again")
def unscaled_on_every_micro_batch(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 4).backward()
    setup.scaler.unscale_(setup.optimizer)
    if setup.step_index % 4 == 3:
        finish(setup, loss)
        setup.optimizer.zero_grad()
    return loss.detach()


@loop("missing-update")
def never_updated(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizer)
    return loss


@loop("missing-update", one(torch.optim.AdamW, fused=True, lr=0.01))
def never_updated_after_unscaling(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    setup.scaler.step(setup.optimizer)
    return loss


@loop("missing-update")
def left_early_without_an_update(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    return loss if setup.step_index == 1 else finish(setup, loss)


@loop("stepped-twice")
def stepped_twice(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizer)
    return finish(setup, loss)


@loop("loss-not-scaled")
def never_scaled(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    return finish(setup, loss)


@loop("zeroed-before-step")
def cleared_before_the_step(setup, batch):
    loss = scaled(setup, batch)
    setup.optimizer.zero_grad()
    return finish(setup, loss)


@loop("zeroed-before-step", one(torch.optim.AdamW, fused=True, lr=0.01))
def cleared_before_a_fused_step(setup, batch):
    return cleared_before_the_step(setup, batch)


@loop("zeroed-before-step", two())
def cleared_between_two_steps(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizers["body"])
    setup.model.zero_grad()
    setup.scaler.step(setup.optimizers["head"])
    setup.scaler.update()
    return loss


@loop("extra-update")
def updated_on_every_micro_batch(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 4).backward()
    if setup.step_index % 4 == 3:
        setup.scaler.step(setup.optimizer)
        setup.optimizer.zero_grad()
    setup.scaler.update()
    return loss.detach()


@loop("extra-update")
def updated_twice(setup, batch):
    loss = plain(setup, batch)
    setup.scaler.update()
    return loss


@loop("stepped-past-scaler")
def stepped_directly_and_updated(setup, batch):
    loss = scaled(setup, batch)
    setup.optimizer.step()
    setup.scaler.update()
    return loss


@loop(
    "scaler-refuses",
    lambda: TrainingSetup(m := loops.Net().half(), torch.optim.SGD(m.parameters()), scaler=loops.scaler_of()),
)
def float16_weights(setup, batch):
    loss = setup.model(batch[0].half()).float().pow(2).mean()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("scaler-refuses", two())
def part_without_gradients(setup, batch):
    setup.model.zero_grad()
    loss = setup.model.body(batch[0]).pow(2).mean()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("scaler-refuses", one(torch.optim.LBFGS, lr=0.1))
def closure_through_the_scaler(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizer, closure=lambda: loss)
    return loss


@pytest.mark.parametrize("name", ERRORS)
def test_a_scalers_error_is_explained_by_what_came_before_it(name):
    """CheckFailed comes from the scaler's error, with one finding: the cause, and nothing spurious beside it."""
    rule, make_setup, step = ERRORS[name]
    with pytest.raises(CheckFailed) as caught:
        assert_mixed_precision_training(make_setup, loops.BATCHES, step)
    assert [finding.rule for finding in caught.value.findings] == [rule]
    assert caught.value.report.notes == ()
    assert isinstance(caught.value.__cause__, (RuntimeError, AssertionError, ValueError))
    assert type(caught.value.__cause__) is not CheckFailed
    assert step.__name__ in {frame.name for frame in caught.traceback} or caught.value.__cause__.__traceback__


def test_the_error_of_a_rule_that_is_allowed_passes_through():
    """allow= takes the explanation away, and not the error that ended the loop."""
    _, make_setup, step = ERRORS["stepped_twice"]
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        check_mixed_precision_training(make_setup, loops.BATCHES, step, allow=["stepped-twice"])


def test_a_message_of_a_scalers_error():
    """It names both lines, the optimizer, the step, and what the scaler said."""
    _, make_setup, step = ERRORS["unscaled_for_the_log_and_for_the_clip"]
    first = step.__code__.co_firstlineno + 3
    file = Path(__file__).name
    report = check_mixed_precision_training(make_setup, loops.BATCHES, step)
    assert str(report).partition("\n\nTelemetry:")[0] == (
        "Mixed precision training: failed, 1 finding\n\n"
        f"[unscaled-twice] unscale_() was called twice for optimizer 'optimizer' in step 0: at {file}:{first} and at "
        f"{file}:{first + 1}: the GradScaler raised at {file}:{first + 1} in step 0 (unscale_() has already been "
        "called on this optimizer since the last update())\n"
        "  cause: a scaler unscales an optimizer's gradients once an update: dividing them twice would make them too "
        "small\n"
        f"  fix: keep one of the two calls, that at {file}:{first}"
    )


@pytest.mark.parametrize("check", [assert_mixed_precision_training, check_mixed_precision_training])
def test_errors_of_the_persons_code_pass_through(check):
    """Their type, their text and the step's frame are as ever, also where an assertion failed."""

    def step(setup, batch):
        assert setup.step_index < 2, "mine"
        return plain(setup, batch)

    with pytest.raises(AssertionError, match="mine") as caught:
        check(one(), loops.BATCHES, step)
    assert not isinstance(caught.value, (CheckFailed, NotJudged))
    assert caught.traceback[-1].name == "step"


def test_the_assertion_returns_the_run():
    """A correct loop gives its run, with the records of all steps."""
    run = assert_mixed_precision_training(one(), loops.BATCHES, plain, steps=5)
    assert isinstance(run, TrainingRun)
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [1] * 5
    assert run.error is None


def test_a_loop_without_an_update_is_not_judged():
    """Nothing stepped and nothing was found: the test fails as one that judged nothing."""

    def step(setup, batch):
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss / 8).backward()
        return loss.detach()

    with pytest.raises(NotJudged):
        assert_mixed_precision_training(one(), loops.BATCHES, step, steps=4, every=8)


def test_loss_fn_is_trained_with_the_standard_step():
    """loss_fn= alone is enough: the standard step scales, unscales, steps and updates."""
    report = check_mixed_precision_training(
        one(), loops.BATCHES, loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean()
    )
    assert report.ok


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.0}, TypeError, "every must be an int, got 2.0"),
        ({"max_skipped_fraction": 1.5}, ValueError, "max_skipped_fraction must lie between 0 and 1, got 1.5"),
        ({"max_skipped_fraction": "half"}, TypeError, "max_skipped_fraction must be a number, got 'half'"),
        ({"allow": "stepped-twice"}, TypeError, "allow must be a list of rule ids, got 'stepped-twice'"),
        ({"allow": ["clip-before-unscal"]}, ValueError, "did you mean clip-before-unscale"),
        (
            {"allow": ["missing-zero-grad"]},
            ValueError,
            "allow names the rule 'missing-zero-grad', which does not exist",
        ),
    ],
)
def test_wrong_arguments_are_errors_of_the_call(options, error, message):
    """The message names the argument, what was got and what is allowed; nothing is trained."""
    with pytest.raises(error, match=message):
        check_mixed_precision_training(lambda: pytest.fail("trained"), loops.BATCHES, plain, **options)


def test_what_a_scaler_may_skip_is_an_option():
    """A share of skipped updates that is allowed passes."""

    def step(setup, batch):
        loss = scaled(setup, batch)
        if setup.step_index % 2:
            setup.model.head.weight.grad[0, 0] = float("inf")
        return finish(setup, loss)

    def skips(share):
        report = check_mixed_precision_training(one(scale=2.0**14), loops.BATCHES, step, max_skipped_fraction=share)
        return "skipped-updates" in {finding.rule for finding in report.findings}

    assert [skips(0.25), skips(0.4), skips(0.6)] == [True, True, False]


def test_rules_have_one_kind():
    """An id is a finding or a note, and the package exports both lists."""
    assert not set(AMP_FINDINGS) & set(AMP_NOTES)
    assert tl_amp.__all__ == [
        "AMP_FINDINGS",
        "AMP_NOTES",
        "assert_mixed_precision_training",
        "check_mixed_precision_training",
    ]
