"""Rules that may be broken in all checks: --tl-allow and tl_allow."""

from __future__ import annotations

import pytest

import tl_core
from tl_pytest._common import Common
from tl_pytest._runner import TrainingRunner

BROKEN = """
import pytest
from tl_pytest import CheckFailed, TrainingSetup

def two_layers():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    return TrainingSetup(model, torch.optim.SGD(model[1].parameters(), lr=0.1))

def without_zero_grad(setup, batch):
    loss = torch.nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss

def test_run(training_runner):
    run = training_runner.run(make_setup, make_batch(), without_zero_grad, steps=6)
    run.assert_healthy()

def test_observe(training_runner):
    setup = make_setup()
    with training_runner.observe(setup) as run:
        for _ in range(6):
            without_zero_grad(setup, make_batch())
    run.assert_healthy()

def test_coverage(training_runner):
    setup = two_layers()
    assert training_runner.assert_optimizer_coverage(setup.model, setup.optimizer).ok
"""


def test_a_rule_is_allowed_in_all_tests(run_tests, loop):
    """Without the options all three tests fail; each rule lets the tests pass that break no other one."""
    run_tests(loop + BROKEN).assert_outcomes(failed=3)
    run_tests(loop + BROKEN, "--tl-allow=missing-zero-grad").assert_outcomes(passed=2, failed=1)
    rules = ("--tl-allow=uncovered-parameter", "--tl-allow=missing-zero-grad")
    run_tests(loop + BROKEN, *rules).assert_outcomes(passed=3)


def test_what_is_not_allowed_is_still_found_by_the_coverage_check(run_tests, loop):
    """Allowing another of its rules does not silence the check."""
    result = run_tests(loop + BROKEN, "--tl-allow=listed-twice", "-k", "coverage")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*CheckFailed: Optimizer coverage: failed, 1 finding"])


class _Recorder:
    def __init__(self) -> None:
        self.allowed: list[object] = []

    def __getattr__(self, name):
        return lambda *_, allow, **__: self.allowed.append(allow)


@pytest.fixture
def allowed(monkeypatch):
    """Give what the checks get for `allow` from a runner to which rules of several checks were given."""

    def call(method: str, **given):
        recorder = _Recorder()
        for package in ("tl_accum", "tl_amp", "tl_resume"):
            monkeypatch.setattr(f"tl_pytest._runner.{package}", recorder)
        rules = ("zeroed-before-step", "rng-not-restored", "not-judged", "mean-of-means", "not-synced")
        runner = TrainingRunner("cpu", 0, Common(allow=rules))
        getattr(runner, method)("setup", "data", "step", **given)
        return recorder.allowed

    return call


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("assert_resume_equivalent", ["rng-not-restored", "not-judged"]),
        ("assert_checkpoint_crash_safe", ["not-synced"]),
        ("assert_accumulation_equivalent", ["not-judged", "mean-of-means"]),
        ("assert_mixed_precision_training", ["zeroed-before-step", "not-judged"]),
    ],
)
def test_each_check_gets_the_rules_that_it_knows(allowed, method, expected):
    """A check refuses a rule that it does not have: it gets its own, after those of the call."""
    assert allowed(method) == [expected]
    assert allowed(method, allow=("a",)) == [["a", *expected]]


@pytest.mark.parametrize("given", ["lr-zero", None, 3], ids=str)
def test_a_wrong_argument_is_left_for_the_check_to_refuse(allowed, given):
    """A text in place of a list is not taken apart into letters."""
    assert allowed("assert_resume_equivalent", allow=given) == [given]
    with pytest.raises(TypeError) as caught:
        tl_core.check_rule_ids(given, "allow", ["lr-zero"])
    assert str(caught.value).startswith("allow must be a list of rule ids, got ")


def test_without_options_a_check_gets_what_the_call_gave(monkeypatch):
    """Nothing is added, and the object is the call's own."""
    recorder = _Recorder()
    monkeypatch.setattr("tl_pytest._runner.tl_resume", recorder)
    given = ["rng-not-restored"]
    TrainingRunner("cpu", 0).assert_resume_equivalent("setup", "data", "step", allow=given)
    assert recorder.allowed[0] is given
