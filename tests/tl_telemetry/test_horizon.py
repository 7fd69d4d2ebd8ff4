"""Which schedules are compared with which number of their steps, and what is said of them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import CheckFailed, Finding, TrainingSetup
from tl_telemetry import TrainingRun, observe, run_training

spec = importlib.util.spec_from_file_location("horizon_case", Path(__file__).parent / "cases" / "schedule_horizon.py")
assert spec is not None
assert spec.loader is not None
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)

UNDECIDED = (
    "undecided: its length counts something else than its steps (epochs, micro-batches, updates), or is that of "
    "a longer or shorter training"
)


def trained(make: Callable[[Any], Any], **options: Any) -> TrainingRun:
    case = loops.case(make, **options)
    case.pop("judge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler that steps first
        return run_training(**case)


def told(run: TrainingRun, planned: Any, rule: str = "schedule-horizon") -> list[Finding]:
    return [note for note in run.check(num_updates=planned).notes if note.rule == rule]


def test_a_note_holds_its_numbers():
    """The numbers are there for programs too."""
    (note,) = told(trained(lambda o: lr_scheduler.CosineAnnealingLR(o, 5)), 40)
    assert note.evidence == {"horizon": 5, "scheduler_steps": 40, "updates": 40}


SCHEDULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cosine too long": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 100),
        "(CosineAnnealingLR, T_max=100) is over after 100 steps of its own, but makes only 40 in the 40 updates of "
        "'optimizer', which end before that",
    ),
    "one cycle": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
        "(OneCycleLR, total_steps=30) is over after 30 steps of its own, and makes 40 in the 40 updates of "
        "'optimizer': from its step 31 on its step() raises a ValueError",
    ),
    "polynomial": (
        lambda o: lr_scheduler.PolynomialLR(o, 5),
        "(PolynomialLR, total_iters=5) is over after 5 steps of its own, and makes 40 in the 40 updates of "
        "'optimizer': from its step 6 on the rate stays at 0",
    ),
    "linear decay": (
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=10),
        "(LinearLR, total_iters=10) is over after 10 steps of its own, and makes 40 in the 40 updates of 'optimizer': "
        "from its step 11 on the rate stays as it is",
    ),
    "a warmup that never ends": (
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=100),
        "(LinearLR, total_iters=100) is over after 100 steps of its own, but makes only 40 in the 40 updates of "
        "'optimizer', which end before that",
    ),
    "a constant warmup that never ends": (
        lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=100),
        "(ConstantLR, total_iters=100) is over after 100 steps of its own, but makes only 40 in the 40 updates of "
        "'optimizer', which end before that",
    ),
    "the last of a sequence": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 40)], milestones=[5]
        ),
        "(SequentialLR, 5 steps and then CosineAnnealingLR, T_max=40) is over after 45 steps of its own, but makes "
        "only 40 in the 40 updates of 'optimizer', which end before that",
    ),
    "a sequence whose last never begins": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[80]
        ),
        "(SequentialLR, milestones=[80]) begins its last schedule after 80 steps of its own, but makes only 40 in the "
        "40 updates of 'optimizer', which end before that",
    ),
    "one of a chain": (
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 400)]),
        "(CosineAnnealingLR, T_max=400) is over after 400 steps of its own, but makes only 40 in the 40 updates of "
        "'optimizer', which end before that",
    ),
    "a function's keyword": (
        lambda o: lr_scheduler.LambdaLR(o, loops.to_zero(10)),
        "(LambdaLR, num_training_steps=10) is over after 10 steps of its own, and makes 40 in the 40 updates of "
        "'optimizer'",
    ),
    "a closure's variable, through a partial": (
        lambda o: lr_scheduler.LambdaLR(o, partial(closure(10), 0)),
        "(LambdaLR, num_training_steps=10) is over after 10 steps of its own, and makes 40 in the 40 updates of "
        "'optimizer'",
    ),
}


def closure(num_training_steps: int) -> Callable[[int, int], float]:
    """A schedule as transformers built it before it used partial; a second variable is not set."""
    if num_training_steps < 0:
        unset = 0

    def factor(begin: int, step: int) -> float:
        if step > 1000:
            return unset
        return max(0.0, 1.0 - (step - begin) / num_training_steps)

    return factor


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_has_its_horizon(name: str):
    """The class, what sets its length, both numbers, and what happens beyond are named."""
    make, seen = SCHEDULES[name]
    (note,) = told(trained(make), 40)
    assert note.seen == f"'scheduler' {seen}"
    assert note.cause == UNDECIDED


def test_the_fix_of_a_longer_schedule_tells_of_the_whole_training():
    """The updates that were given may be those of a test's run, for which nobody builds a schedule."""
    (note,) = told(trained(lambda o: lr_scheduler.CosineAnnealingLR(o, 100)), 40)
    assert note.fix == (
        "give it the number of steps that it makes, 40, or step it as often as its length says; nothing, if it is "
        "meant, or where these updates are a part of the training: then pass the number of all as num_updates="
    )


def test_schedules_of_several_groups_are_named_once():
    """A LambdaLR with one function a group gives one note for all that are alike."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01)
        return TrainingSetup(model, optimizer, lr_scheduler.LambdaLR(optimizer, [loops.to_zero(5), loops.to_zero(5)]))

    case = loops.buggy() | {"make_setup": make_setup}
    case.pop("judge")
    assert len(told(run_training(**case), 40)) == 1


def test_how_often_it_steps_is_read_off_the_run():
    """Once in several updates, several times an update, before or after it: what follows is counted from that."""
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=12)
    (note,) = told(trained(cosine, every=5), 100)
    assert note.seen == (
        "'scheduler' (CosineAnnealingLR, T_max=12) is over after 12 steps of its own, and makes 20 in the 100 updates "
        "of 'optimizer' (once in 5 updates): from its step 13 on the rate rises again"
    )
    (note,) = told(trained(cosine, accumulation=2), 50)
    assert note.seen == (
        "'scheduler' (CosineAnnealingLR, T_max=12) is over after 12 steps of its own, and makes 100 in the 50 updates "
        "of 'optimizer' (2 an update): from its step 13 on the rate rises again"
    )
    (note,) = told(trained(cosine, first=True), 40)
    assert "and makes 40 in the 40 updates of 'optimizer': from" in note.seen


def test_a_length_in_updates_or_backward_passes_is_established():
    """Where the length is the number of updates or of backward passes, and the steps are others, that is the cause."""
    (note,) = told(trained(partial(lr_scheduler.CosineAnnealingLR, T_max=80), every=5), 80)
    assert "but makes only 16 in the 80 updates" in note.seen
    assert note.cause == "its length is the number of updates, which it does not step with"
    (note,) = told(trained(partial(lr_scheduler.CosineAnnealingLR, T_max=80), accumulation=4, every=4), 20)
    assert "but makes only 20 in the 20 updates" in note.seen
    assert note.cause == "its length is the number of backward passes (4 an update), which it does not step with"


@pytest.mark.parametrize(
    ("every", "steps"), [(15, "1 time"), (100, "0 times")], ids=["once in the run", "never in the run"]
)
def test_a_rhythm_that_does_not_show_is_not_judged(every: int, steps: str):
    """One step in a part of the training, or none, does not tell how many there will be."""
    run = trained(partial(lr_scheduler.CosineAnnealingLR, T_max=3), every=every)
    assert told(run, 400) == []
    (note,) = told(run, 400, "not-judged")
    assert str(note) == (
        f"[not-judged] 'scheduler' stepped {steps} in 20 updates of 'optimizer', which does not tell how often it will "
        "in 400: whether its schedule is as long as the training could not be judged\n"
        "  fix: run until it has stepped at least twice, at equal distances"
    )


def test_a_whole_run_is_counted():
    """Where the run makes all updates, its scheduler's steps are counted, however irregular they are."""
    run = trained(partial(lr_scheduler.CosineAnnealingLR, T_max=9), every=15)
    (note,) = told(run, 20)
    assert "but makes only 1 in the 20 updates of 'optimizer', which" in note.seen
    assert told(run, 20, "not-judged") == []
    assert told(trained(partial(lr_scheduler.CosineAnnealingLR, T_max=9), every=100), 20) == []


def test_updates_that_a_scaler_skips_are_no_difference():
    """A GradScaler's first skips neither hide the rhythm nor count as steps that are missing."""

    def make_setup(horizon: int) -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=1e-8)
        return TrainingSetup(model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, horizon), scaler=scaler)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        setup.scaler.scale(loss * 40.0).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        setup.scheduler.step()
        return loss

    for horizon, notes in ((40, 0), (42, 0), (60, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the scheduler's first step is before the first update
            run = run_training(lambda horizon=horizon: make_setup(horizon), (loops.X, loops.Y), step, steps=20)
        assert 0 < run._num_updates("optimizer") < 20
        assert len(told(run, 40)) == notes
        assert told(run, 40, "not-judged") == []


def test_strict_turns_the_note_into_a_finding():
    """Whoever means the number can demand it."""
    run = trained(lambda o: lr_scheduler.CosineAnnealingLR(o, 5))
    with pytest.raises(CheckFailed) as caught:
        run.assert_healthy(num_updates=40, strict=["schedule-horizon"])
    assert [str(finding) for finding in caught.value.findings] == [loops.MESSAGE]
    run.assert_healthy(num_updates=40, strict=["schedule-horizon"], allow=["schedule-horizon"])


def test_the_number_that_was_asserted_is_the_plan_from_then_on():
    """assert_num_updates lets later verdicts judge horizons; a number given there goes before it."""
    run = trained(lambda o: lr_scheduler.CosineAnnealingLR(o, 5))
    assert run.notes == ()
    run.assert_num_updates(20)
    assert [note.rule for note in run.notes] == ["schedule-horizon"]
    assert "makes 20 in the 20 updates" in run.report.notes[0].seen
    assert "makes 40 in the 40 updates" in told(run, 40)[0].seen
    with pytest.raises(CheckFailed, match="schedule-horizon"):
        run.assert_num_updates({"optimizer": 20}).assert_healthy(strict=["schedule-horizon"])


def test_the_number_of_a_part_of_the_training_is_no_plan():
    """While the run goes on, and where a scheduler had stepped before it, its own number says nothing of a schedule."""
    case = loops.case(lambda o: lr_scheduler.CosineAnnealingLR(o, 40))
    setup = case["make_setup"]()
    reports = []
    for _ in range(2):
        with observe(setup) as run:
            for index in range(20):
                setup.step_index = index
                with run.step() as current:
                    current.loss = case["step"](setup, case["data"])
                if index == 4:
                    run.assert_num_updates(5)
        assert not run._planned
        reports.append(run.assert_num_updates(20).report)
    assert [[note.rule for note in report.notes] for report in reports] == [["schedule-horizon"], []]
    assert told(run, 40) == []  # the whole training's


def test_only_the_optimizers_that_are_named_are_judged():
    """With numbers by optimizer name, a scheduler of another optimizer is left alone."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        optimizers = {
            "a": torch.optim.SGD([model.weight], lr=0.01),
            "b": torch.optim.SGD([model.bias], lr=0.01),
        }
        cosine = lr_scheduler.CosineAnnealingLR
        return TrainingSetup(model, optimizers, {name: cosine(one, 5) for name, one in optimizers.items()})

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        for one in (*setup.optimizers.values(), *setup.schedulers.values()):
            one.step()
        setup.model.zero_grad()
        return loss

    run = run_training(make_setup, (loops.X, loops.Y), step, steps=20)
    assert [note.seen[:3] for note in told(run, 40)] == ["'a'", "'b'"]
    assert [note.seen[:3] for note in told(run, {"b": 40})] == ["'b'"]


@pytest.mark.parametrize(
    ("planned", "error", "message"),
    [
        (1.5, TypeError, "num_updates must be an int or a dict of ints by optimizer name, got 1.5"),
        (True, TypeError, "num_updates must be an int or a dict of ints by optimizer name, got True"),
        ({}, TypeError, "num_updates must be an int or a dict of ints by optimizer name, got {}"),
        ({"a": 1}, ValueError, "num_updates names ['a'], the setup's optimizers are ['optimizer']"),
        (19, ValueError, "num_updates is that of the whole training, got 19; 'optimizer' made 20 so far"),
    ],
)
def test_a_wrong_number_is_an_error(planned: Any, error: type[Exception], message: str):
    """What is no number of updates, and less than the run made already, is refused."""
    run = trained(lambda o: lr_scheduler.CosineAnnealingLR(o, 5))
    for judge in (run.check, run.assert_healthy):
        with pytest.raises(error) as caught:
            judge(num_updates=planned)
        assert str(caught.value) == message
