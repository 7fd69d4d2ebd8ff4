"""How the resume check runs a loop: how often, from which step, in which process, with which step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tl_core import CheckFailed, NotJudged, TrainingSetup, standard_step
from tl_resume import assert_resume_equivalent, check_resume_equivalent, load_training_state, save_training_state

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def make_rich() -> TrainingSetup:
    """Build a setup with many pieces that a checkpoint can lose."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    setup = TrainingSetup(model, optimizer, scheduler, state={"scale": {"value": 1.0}})
    setup.noise = torch.Generator().manual_seed(3)
    setup.shift = torch.zeros(4)
    return setup


def rich_step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
    batch = batch + setup.shift + 0.1 * torch.randn(4, generator=setup.noise)
    loss = setup.state["scale"]["value"] * setup.model(batch).square().mean()
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    setup.scheduler.step()
    setup.shift += 0.01
    setup.state["scale"]["value"] *= 1.1
    return loss


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def save(setup: Any, path: Path) -> None:
    torch.save({"model": setup.model.state_dict(), "step": setup.step_index}, path)


def load(setup: Any, path: Path) -> int:
    state = torch.load(path)
    setup.model.load_state_dict(state["model"])
    return state["step"]


def test_a_check_without_divergence_costs_two_runs_and_a_half() -> None:
    """Twice the whole loop, and its resumed half; ``report.cost`` counts it in runs."""
    calls = []

    def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return loss_fn(model, batch)

    counter = Callable_(counted)
    report = check_resume_equivalent(make_setup, X, loss_fn=counter, steps=8)
    assert report.ok
    assert report.cost == 2.5
    assert Callable_.total == 20


class Callable_:
    """Counts its calls where nothing sets them back: its code is no function that can be followed by name."""

    total = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        type(self).total += 1
        return self.function(*args)


def make_counting() -> TrainingSetup:
    setup = make_rich()
    setup.count = 0
    return setup


def counting_step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
    setup.count += 1
    if setup.count > 100:
        raise StopIteration
    return rich_step(setup, batch)


@pytest.mark.parametrize(("make", "step"), [(make_rich, rich_step), (make_counting, counting_step)])
@pytest.mark.parametrize(("steps", "resume_at"), [(4, None), (9, None), (8, 1), (8, 7)])
def test_a_check_with_many_lost_pieces_costs_at_most_eight_runs(
    steps: int, resume_at: int | None, make: Callable[[], Any], step: Callable[..., Any]
) -> None:
    """Ablation over optimizer, groups, scheduler, entry, tensor and two generators is bounded, decisions included."""
    report = check_resume_equivalent(make, X, step, steps=steps, resume_at=resume_at, save=save, load=load)
    assert len({difference.piece for difference in report.state_differences}) >= 7
    assert not report.ok
    assert report.cost <= 8


def test_what_the_cost_left_untried_is_said() -> None:
    """A resume after the first of 8 steps leaves few trials: a note names what was not tried."""
    report = check_resume_equivalent(make_rich, X, rich_step, resume_at=1, save=save, load=load)
    assert [str(note) for note in report.notes] == [UNTRIED]
    assert [finding for finding in report.findings if "setup.shift" in finding.seen] == []
    assert "not-judged" not in {note.rule for note in check_resume_equivalent(make_setup, X, loss_fn=loss_fn).notes}


UNTRIED = """\
[not-judged] scheduler 'scheduler', setup.state['scale'], setup.noise, setup.shift, the gradients and torch's \
generator differ after loading too; whether that makes the runs part was not tried, since the check may cost 8 runs \
of the loop
  fix: mend what was found, and run the check again"""


def test_an_untried_value_by_which_the_loop_decides_is_a_finding() -> None:
    """That the loop decides by it is seen without a trial; the cause says that its effect was not tried."""
    report = check_resume_equivalent(make_counting, X, counting_step, resume_at=1, save=save, load=load)
    (found,) = [finding for finding in report.findings if "setup.count" in finding.seen]
    line = counting_step.__code__.co_firstlineno + 2
    assert str(found) == UNTRIED_DECISION.format(line=line)


UNTRIED_DECISION = """\
[attribute-not-restored] setup.count 1 when saved, 0 after loading; still different at the end of the run; the loop \
decides by it (test_resume_runs.py:{line})
  cause: training changes it, and the checkpoint does not carry it; its effect was not tried
  fix: save setup.count in the checkpoint and set it again in load()"""


def test_half_of_the_steps_is_kept_where_no_later_step_updates() -> None:
    """A loop without any update after the middle is resumed in the middle, and nothing is said."""
    step = standard_step(loss_fn, accumulation_steps=100)
    report = check_resume_equivalent(make_setup, X, step, steps=6)
    assert report.ok, str(report)
    assert report.resume_at == 3
    assert report.notes == ()


def test_the_resume_moves_on_to_the_next_update() -> None:
    """Half of 8 steps is inside the second cycle of three: the resume is before step 6."""
    report = check_resume_equivalent(make_setup, X, standard_step(loss_fn, accumulation_steps=3), steps=8)
    assert report.ok, str(report)
    assert report.resume_at == 6
    assert [note.rule for note in report.notes] == ["resume-moved"]
    assert len(report.continuous) == 8
    assert report.resumed == report.continuous[6:]
    assert report.diverged_at is None


def test_a_loop_that_never_repeats_is_not_judged() -> None:
    """The assertion raises NotJudged, which carries the report."""
    built = iter(range(100))

    def make_other() -> TrainingSetup:
        setup = make_setup()
        nn.init.constant_(setup.model.weight, float(next(built)))
        return setup

    with pytest.raises(NotJudged) as caught:
        assert_resume_equivalent(make_other, X, loss_fn=loss_fn)
    assert [note.rule for note in caught.value.report.notes] == ["not-judged"]


def test_losses_that_are_nan_in_both_runs_agree() -> None:
    """NaN from the same step on is no divergence; NaN in the resumed run only is one."""

    def broken(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        nan = float("nan") if setup.count in setup.bad else 1.0
        return standard_step(loss_fn)(setup, batch) * nan

    def make_counting(bad: tuple[int, ...]) -> Callable[[], TrainingSetup]:
        def make() -> TrainingSetup:
            setup = make_setup()
            setup.count, setup.bad = 0, bad
            return setup

        return make

    always = check_resume_equivalent(make_counting(tuple(range(3, 20))), X, broken)
    assert always.ok, str(always)
    assert all(loss != loss for loss in always.continuous[2:])
    once = check_resume_equivalent(make_counting((1,)), X, broken, save=save, load=load)
    assert [finding.rule for finding in once.findings] == ["attribute-not-restored"]
    assert "loss nan resumed" in once.findings[0].seen


def test_a_fresh_process_runs_the_resumed_half() -> None:
    """Functions of a test's module can be imported there; the losses that come back are those of this process."""
    report = check_resume_equivalent(
        make_setup, X, loss_fn=loss_fn, save=save, load=load, fresh_process=True, restores_step=True
    )
    assert report.ok, str(report)
    assert report.cost == 2.5
    assert report.resumed == report.continuous[4:]


class _Unsendable:
    """A batch that cannot go to another process."""

    def __init__(self) -> None:
        self.values, self.key = X, lambda: None


def _values_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_fn(model, batch.values)


def test_a_fresh_process_needs_batches_that_can_be_sent() -> None:
    """What pickle says of a batch that refuses stands in the error."""
    batches = [_Unsendable()]
    with pytest.raises(ValueError, match=r"^fresh_process=True needs batches that can be sent to a process: .*lambda"):
        check_resume_equivalent(make_setup, batches, loss_fn=_values_loss, fresh_process=True)


def test_make_step_builds_a_step_for_each_run() -> None:
    """Each run has its own step; what it counts by itself and decides by is lost, where load does not set it."""
    built = []

    def make_step() -> Callable[..., Any]:
        number = 0
        built.append(None)

        def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
            nonlocal number
            number += 1
            return standard_step(loss_fn)(setup, batch / number)

        return step

    report = check_resume_equivalent(make_setup, X, make_step=make_step, save=save, load=load)
    assert [finding.rule for finding in report.findings] == ["outside-state-not-restored"]
    assert report.findings[0].seen.startswith("number (closure of step) 4 when saved, 0 after loading; the runs part")
    assert len(built) >= 4
    assert check_resume_equivalent(make_setup, X, make_step=lambda: standard_step(loss_fn)).ok


@pytest.mark.parametrize("told", [4, np.int64(4), torch.tensor(4)])
def test_load_may_return_the_step(told: Any) -> None:
    """An int, a numpy integer and an integer tensor all tell the step."""
    report = check_resume_equivalent(
        make_setup, X, loss_fn=loss_fn, save=save, load=lambda s, p: (load(s, p), told)[1], restores_step=True
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        (
            3,
            "load() returned 3, and the run that saved had 4 steps behind it: step 3, which was done before saving, "
            "would run again",
        ),
        (
            0,
            "load() returned 0, and the run that saved had 4 steps behind it: the run would start again from step 0, "
            "its schedule and its data with it",
        ),
        (5, "load() returned 5, and the run that saved had 4 steps behind it: the run would go on from step 5"),
        (
            True,
            "load() returned True, which is no int, and left setup.step_index at 0, and the run that saved had 4 steps "
            "behind it: the run would start again from step 0, its schedule and its data with it",
        ),
    ],
)
def test_a_load_that_tells_another_step(told: Any, seen: str) -> None:
    """Off by one, from the start, too far, and an answer that is no step; the assertion fails."""
    with pytest.raises(CheckFailed) as caught:
        assert_resume_equivalent(
            make_setup, X, loss_fn=loss_fn, save=save, load=lambda s, p: (load(s, p), told)[1], restores_step=True
        )
    assert [(finding.rule, finding.seen) for finding in caught.value.report.findings] == [("step-not-restored", seen)]


def test_the_defaults_restore_the_step() -> None:
    """Without save and load the training state is saved, the step with it."""
    assert check_resume_equivalent(make_rich, X, rich_step, restores_step=True).ok
    report = check_resume_equivalent(
        make_rich, X, rich_step, save=save_training_state, load=load_training_state, restores_step=True
    )
    assert report.ok, str(report)


def test_big_states_pass_through_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 1 MB go to files in the check's folder, and are compared and put back from there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sizes: list[int] = []

    def make_big() -> TrainingSetup:
        model = nn.Linear(1024, 512)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def looking_load(setup: Any, path: Path) -> None:
        load(setup, path)
        sizes.extend(file.stat().st_size for file in (path.parents[1] / "tensors").iterdir())

    report = check_resume_equivalent(
        make_big, torch.ones(2, 1024), loss_fn=loss_fn, steps=4, save=save, load=looking_load
    )
    assert [finding.rule for finding in report.findings] == ["optimizer-state-not-restored"]
    assert report.findings[0].seen.endswith("with it put back after loading, the resumed run is the uninterrupted one")
    assert set(sizes) == {2 << 20}
    assert list(tmp_path.iterdir()) == []
