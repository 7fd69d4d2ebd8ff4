"""Errors of the person's own, and the check's two faces."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tl_amp
from tl_amp import AMP_FINDINGS, AMP_NOTES, assert_mixed_precision_training, check_mixed_precision_training
from tl_core import CheckFailed, NotJudged
from tl_telemetry import TrainingRun

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
one, plain, loss_of = loops.one, loops.plain, loops.loss_of


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
