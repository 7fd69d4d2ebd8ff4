from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from tl_core import CheckFailed, Finding, TrainingSetup
from tl_telemetry import Evidence, run_training


def make_setup():
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.model(batch).pow(2).mean()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def run():
    return run_training(make_setup, torch.ones(2, 3), step, steps=2)


def first(run: Evidence):
    yield Finding("first", f"seen in {len(run.steps)} updates", "a cause", "a fix", steps=(0,), parameters=("weight",))


def second(run: Evidence):
    yield Finding("second", "seen too", "", "", parameters=("weight",))


def broken(run: Evidence):
    yield from ()
    raise LookupError("nothing there")


def test_a_run_is_judged_by_somebody_elses_rules(run):
    """Findings come in the rules' order under the check's name, with the table around their steps."""
    report = run.judge((first, second), check="Some check")
    table = run.table(around=[0])
    assert str(report) == (
        "Some check: failed, 2 findings\n\n"
        "[first] seen in 2 updates\n  cause: a cause\n  fix: a fix\n\n"
        f"[second] seen too\n\nTelemetry:\n{table}"
    )
    with pytest.raises(CheckFailed):
        report.require()


def test_what_may_be_meant_is_a_note_unless_it_is_asked_for(run):
    """Ids among the notes are notes, strict turns them into findings, and allow takes both away."""
    rules = (first, second)
    noted = run.judge(rules, check="Some check", notes=("first", "not-judged"))
    assert ([f.rule for f in noted.findings], [f.rule for f in noted.notes]) == (["second"], ["first"])
    strict = run.judge(rules, check="Some check", notes=("first",), strict=("first",))
    assert [f.rule for f in strict.findings] == ["first", "second"]
    allowed = run.judge(rules, check="Some check", allow=("first", "second"))
    assert allowed.ok
    assert str(allowed) == "Some check: passed"


def test_consequences_are_hidden_behind_their_cause(run):
    """A finding that another one explains is left out, unless it names further parameters."""
    explains = {"first": {"second", "third"}}

    def third(run):
        yield Finding("third", "elsewhere", "", "", parameters=("bias",))

    report = run.judge((first, second, third), check="Some check", explains=explains)
    assert [finding.rule for finding in report.findings] == ["first", "third"]


def test_a_rule_that_raises_is_a_note(run):
    """The other rules' verdict stands, and the note names the rule and its error."""
    report = run.judge((broken, first), check="Some check")
    assert [finding.rule for finding in report.findings] == ["first"]
    assert [str(note) for note in report.notes] == [
        "[not-judged] the rule broken could not look: LookupError: nothing there\n"
        "  fix: report it: a rule should look at every loop, or say why it cannot"
    ]


def test_a_run_without_an_update_is_not_judged():
    """Where no optimizer stepped and nothing was found, the report passes no verdict."""
    report = run_training(make_setup, torch.ones(2, 3), lambda setup, batch: 0.0, steps=2).judge((), check="Some check")
    assert not report.judged
    assert [note.rule for note in report.notes] == ["not-judged"]


def raises_in_third(setup, batch):
    if setup.step_index == 2:
        raise LookupError("no more")
    return step(setup, batch)


def test_an_exception_that_is_caught_ends_the_run():
    """The run has the records up to it, the broken step's included, and keeps the exception with its traceback."""
    run = run_training(make_setup, torch.ones(2, 3), raises_in_third, steps=5, catch=(LookupError,))
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [1, 1, 0]
    assert isinstance(run.error, LookupError)
    frames = traceback.extract_tb(run.error.__traceback__)
    assert frames[-1].name == "raises_in_third"
    assert run.judge((), check="Some check").ok


def test_other_exceptions_pass_through():
    """A type that is not listed is raised as ever; a run that ended by itself has no error."""
    with pytest.raises(LookupError, match="no more"):
        run_training(make_setup, torch.ones(2, 3), raises_in_third, steps=5, catch=(ValueError,))
    assert run_training(make_setup, torch.ones(2, 3), step, steps=2, catch=(ValueError,)).error is None


def test_what_a_step_returns_is_not_caught():
    """A step that returns no loss is an error of the call, also where everything is caught."""
    with pytest.raises(TypeError, match="loss"):
        run_training(make_setup, torch.ones(2, 3), lambda setup, batch: "three", steps=1, catch=(Exception,))


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.outer = nn.Sequential(nn.Linear(1, 1), nn.Softplus())

    def forward(self, x):
        return self.outer(self.inner(x) * 1e30 * 1e30)


def test_the_repeated_step_names_the_module():
    """The first operation that overflows is told with the innermost module of the model that ran it."""

    def setup_of():
        model = Overflowing()
        return TrainingSetup(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))

    run = run_training(setup_of, torch.ones(2, 3), step, steps=1)
    (made, *_) = run.facts.find_nonfinite(0).made
    assert (made.operation, made.module, made.backward) == ("mul", "0", False)


def test_a_step_is_repeated_once_however_many_rules_ask():
    """What made a step's values non-finite is found by running the loop again, and then known."""
    built = []

    def make_setup():
        built.append(1)
        model = torch.nn.Linear(2, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(setup, batch):
        loss = (setup.model(batch) * 0.0).log().sum()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    run = run_training(make_setup, torch.ones(3, 2), step, steps=2)
    assert run.facts.origin(0).made
    assert run.facts.origin(0) is run.facts.origin(0)
    assert len(built) == 2
    run.facts.find_nonfinite = None
    assert run.facts.origin(1) is None
