"""Runs whose setup comes to be only after watching was asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

from tl_core import CheckFailed, NotJudged, TrainingSetup
from tl_telemetry import LateRun, TrainingRun, observe, observe_later

NOTHING = "nothing was observed: the training that this run waits for has not begun"


def make_setup(lr=0.1):
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))


def train(setup, steps=3):
    for _ in range(steps):
        setup.optimizer.zero_grad()
        setup.model(torch.ones(2, 3)).pow(2).mean().backward()
        setup.optimizer.step()


# What has to be given to a look.
GIVEN = {
    "assert_grad_norm_below": (1.0,),
    "assert_lr": (0.1,),
    "assert_num_updates": (3,),
    "judge": ([],),
    "to_jsonl": ("never-written.jsonl",),
}
LOOKS = [name for name in vars(TrainingRun) if not name.startswith("_") and name != "adopt"]


def look(run, name):
    value = getattr(run, name)
    if name == "step":
        with value():
            pytest.fail("a step of a run that has not begun")
    return value(*GIVEN.get(name, ()), **({"check": "Mine"} if name == "judge" else {})) if callable(value) else value


@pytest.mark.parametrize("name", LOOKS)
def test_any_look_before_the_beginning_is_an_error(name):
    """Nothing of a run that has not begun looks like a verdict."""
    with observe_later() as run, pytest.raises(RuntimeError) as error:
        look(run, name)
    assert str(error.value) == NOTHING


def test_there_are_looks_to_test():
    """The test above goes through the assertions, the records and the verdicts."""
    assert {"assert_healthy", "check", "evidence", "findings", "losses", "ok", "records", "step", "table"} <= {*LOOKS}


@pytest.mark.parametrize("name", LOOKS)
def test_any_look_after_a_block_without_a_training_judges_nothing(name):
    """Where no training came, there is no verdict: that is a failure of its own kind."""
    with observe_later() as run:
        pass
    with pytest.raises(NotJudged) as error:
        look(run, name)
    assert (
        str(error.value)
        == """\
Training run: could not judge

Notes:
[not-judged] no training began inside of the watch
  fix: look at its limits and data"""
    )


def test_it_shows_that_it_has_not_begun():
    """Its repr says so, and after the beginning is that of a run."""
    with observe_later() as run:
        assert repr(run) == "LateRun(training has not begun)"
        assert not run.begun
        run.begin(make_setup())
        assert run.begun
        train(run.setup, 2)
        assert repr(run) == "TrainingRun(2 steps, updates: optimizer 2)"


def test_it_observes_from_the_beginning_on():
    """After ``begin`` it is the run that ``observe`` gives: the same records, figures and verdict."""
    torch.manual_seed(0)
    early = make_setup()
    with observe(early) as expected:
        train(early)
    torch.manual_seed(0)
    late = make_setup()
    with observe_later() as run:
        run.begin(late)
        train(late)
    assert isinstance(run, TrainingRun)
    assert run.setup is late
    assert [record.grad_norm for record in run.records] == [record.grad_norm for record in expected.records]
    assert str(run.check()) == str(expected.check())
    assert run.assert_healthy() is run


def test_steps_can_be_told():
    """``run.step()`` makes a record, with a loss."""
    setup = make_setup()
    with observe_later() as run:
        run.begin(setup)
        with run.step() as step:
            train(setup, 2)
            step.loss = 3.0
    assert run.losses == [3.0]
    assert run.records[0].optimizer_steps == {"optimizer": 2}


def test_a_second_beginning_is_an_error():
    """A run is that of one training, also when the first one has ended."""
    message = "a second training began inside of one watch: give each a watch of its own"
    first = make_setup()
    with observe_later() as run:
        run.begin(first)
        with pytest.raises(RuntimeError) as error:
            run.begin(make_setup())
        assert str(error.value) == message
        run.end()
        with pytest.raises(RuntimeError) as error:
            run.begin(make_setup())
        assert str(error.value) == message
    assert run.setup is first


def test_the_end_may_come_early_twice_and_without_a_beginning():
    """After ``end`` nothing more is recorded; ending what has not begun, or again, does nothing."""
    setup = make_setup()
    with observe_later() as run:
        run.end()
        run.begin(setup)
        train(setup, 2)
        run.end()
        train(setup, 3)
        run.end()
    assert len(run.records) == 2


def attached():
    """What the recorder puts into torch and python."""
    hooks = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
    ]
    return [torch.autograd._engine_run_backward, warnings.showwarning, *(tuple(hook.values()) for hook in hooks)]


@pytest.mark.parametrize("how", ["left", "raised"])
def test_nothing_stays_attached(how):
    """Leaving the block takes everything off, also when the loop raises, and the exception passes."""
    setup = make_setup()
    before = attached()
    during = before
    try:
        with observe_later() as run:
            run.begin(setup)
            during = attached()
            train(setup)
            if how == "raised":
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert how == "raised"
    assert all(now != then for now, then in zip(during, before, strict=True))
    assert attached() == before
    assert len(run.records) == 3


def test_what_is_allowed_and_tracked_is_passed_on():
    """``allow`` holds for the run's verdict, and ``track_updates=False`` leaves the updates out."""
    setup = make_setup(lr=0.0)
    with observe_later(track_updates=False, allow=["lr-zero"]) as run:
        run.begin(setup)
        train(setup)
    assert run.assert_healthy() is run
    assert run.records[0].update_norm == {}
    other = make_setup(lr=0.0)
    with observe_later() as run:
        run.begin(other)
        train(other)
    with pytest.raises(CheckFailed):
        run.assert_healthy()
    assert run.records[0].update_norm == {"optimizer": 0.0}


def test_bad_rules_are_refused_at_once():
    """A rule that does not exist is an error before anything is watched."""
    match = "allow names the rule 'lr-zer', which does not exist; did you mean lr-zero"
    with pytest.raises(ValueError, match=match), observe_later(allow=["lr-zer"]):
        pytest.fail("entered")


def test_a_training_without_a_step_is_not_judged():
    """A beginning alone is nothing to judge."""
    with observe_later() as run:
        run.begin(make_setup())
    with pytest.raises(NotJudged):
        run.assert_healthy()


def test_it_is_made_by_hand_as_well():
    """``LateRun`` can be begun and ended by whoever has no block."""
    run = LateRun()
    setup = make_setup()
    run.begin(setup)
    train(setup)
    run.end()
    assert len(run.records) == 3
