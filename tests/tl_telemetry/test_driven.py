"""The rule about loops that a Trainer drives, where ``setup.driver`` names one and where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_core import CheckFailed, TrainingSetup, seed_everything
from tl_telemetry import observe, run_training

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def make_setup(driver="Lightning", schedulers=None):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizers = {
        "body": torch.optim.SGD(model[0].parameters(), lr=0.001),
        "head": torch.optim.SGD(model[1].parameters(), lr=0.001),
    }
    setup = TrainingSetup(model, optimizers, schedulers or torch.optim.lr_scheduler.StepLR(optimizers["head"], 100))
    setup.driver = driver
    return setup


def make_step(calls, *, accumulate=1):
    """Make a step that calls the scheduler ``calls(index)`` times."""

    def step(setup, batch):
        loss = setup.model(batch).square().mean()
        loss.backward()
        if (setup.step_index + 1) % accumulate == 0:
            for optimizer in setup.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(calls(setup.step_index)):
            setup.scheduler.step()
        return loss

    return step


def seen(report):
    return [(finding.rule, finding.seen) for finding in report.findings]


def test_a_loop_without_a_trainer_gets_only_the_note():
    """Where nobody else steps the scheduler, more steps than updates are the note ``scheduler-too-often``."""
    run = run_training(lambda: make_setup(driver=""), X, make_step(lambda index: 2), steps=6)
    report = run.check()
    assert report.findings == ()
    (note,) = [note for note in report.notes if note.rule == "scheduler-too-often"]
    assert note.seen == "'scheduler' (StepLR) stepped 12 times in 6 updates of 'head' (steps 0-5)"


def test_a_driven_loop_gets_only_the_finding():
    """The note says nothing more where a Trainer steps the scheduler; cause and fix name the Trainer's framework."""
    run = run_training(lambda: make_setup(driver="Catalyst"), X, make_step(lambda index: 2), steps=6)
    report = run.check()
    (finding,) = report.findings
    assert str(finding) == (
        "[scheduler-stepped-twice] 'scheduler' (StepLR) stepped 12 times in 6 updates (steps 0-5)\n"
        "  cause: Catalyst steps it by itself, and so does code of your own: the schedule runs ahead\n"
        "  fix: take the call of its step() out of your code (a hook, a callback), and leave it to the Trainer"
    )
    assert finding.evidence == {"scheduler_steps": 12, "updates": 6}
    assert "scheduler-too-often" not in {note.rule for note in report.notes}


def test_the_second_call_at_an_epochs_end_is_seen():
    """One step with two calls is enough, however few they are in all."""
    run = run_training(make_setup, X, make_step(lambda index: 2 if index == 3 else 0), steps=6)
    assert seen(run.check()) == [
        ("scheduler-stepped-twice", "'scheduler' (StepLR) stepped 2 times in 6 updates (step 3)")
    ]


def test_calls_in_every_micro_batch_are_seen():
    """A call a step is more than a Trainer makes where not every step is an update; steps without one are named."""
    run = run_training(make_setup, X, make_step(lambda index: int(index > 1), accumulate=3), steps=6)
    assert seen(run.check()) == [
        ("scheduler-stepped-twice", "'scheduler' (StepLR) stepped 4 times in 2 updates (steps 3-4)")
    ]


def test_a_loop_without_steps_is_judged_by_its_sums():
    """Where ``observe`` is told of no steps, all calls are held against all updates."""
    seed_everything(0)
    setup = make_setup()
    with observe(setup) as run:
        for _ in range(4):
            make_step(lambda index: 2)(setup, X)
    # two optimizers: a record closes at each update, and a call before it is counted to it
    assert seen(run.check()) == [
        ("scheduler-stepped-twice", "'scheduler' (StepLR) stepped 8 times in 4 updates (steps 2, 4, 6-7)")
    ]


@pytest.mark.parametrize(("calls", "rules"), [(2, []), (3, ["scheduler-stepped-twice"])])
def test_a_scheduler_that_names_no_optimizer_is_held_against_all(calls, rules):
    """It may count the updates of each optimizer, and no more than these."""

    class Counter:
        def __init__(self):
            self.last_epoch = 0

        def step(self):
            self.last_epoch += 1

    run = run_training(lambda: make_setup(schedulers=Counter()), X, make_step(lambda index: calls), steps=4)
    assert [finding.rule for finding in run.check().findings] == rules


def test_a_schedule_by_epochs_in_a_trainer_is_told_in_its_words():
    """Where a Trainer steps the scheduler, the fix is not to call its step() oneself."""
    fixes = []
    for driver in ("", "Lightning", "transformers"):

        def make_setup(driver=driver):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            setup = TrainingSetup(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            setup.driver = driver
            return setup

        def step(setup, batch):
            loss = setup.model(batch).square().mean()
            setup.optimizer.zero_grad()
            loss.backward()
            setup.optimizer.step()
            if setup.step_index % 3 == 2:
                setup.scheduler.step()
            return loss

        run = run_training(make_setup, torch.ones(4, 2), step, steps=9)
        with pytest.raises(CheckFailed) as error:
            run.assert_lr(lambda index: 0.5**index)
        fixes.append(error.value.findings[0].fix)
    assert fixes == [
        "expect the rate of step // 3, or call scheduler.step() in every step",
        "expect the rate of step // 3, or let Lightning step it ('interval': 'step' in what configure_optimizers() "
        "returns for it) in every step",
        "expect the rate of step // 3, or let transformers step it in every step",
    ]
