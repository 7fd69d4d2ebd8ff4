"""Lost values by which the loop decides, without any effect on the losses yet; and values that only show something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import ResumeReport, check_resume_equivalent

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Loop = tuple[Callable[[], Any], Callable[..., Any]]


def make_setup(**extra: Any) -> TrainingSetup:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for name, value in extra.items():
        setattr(setup, name, value)
    return setup


def train(setup: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = (setup.model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: Any, path: Path) -> None:
    torch.save(setup.model.state_dict(), path)


def load(setup: Any, path: Path) -> None:
    setup.model.load_state_dict(torch.load(path))


def check(loop: Callable[[], Loop], **changed: Any) -> ResumeReport:
    make, step = loop()
    return check_resume_equivalent(make, X, step, **{"save": save, "load": load, **changed})


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the line of a function that holds some text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines[first - 1 :], first) if text in line)


# -- loops that decide: each has one line with the comment `# here` ------------------------------------------------


class Stopper:
    """Stops after many steps without an improvement."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.bad = 0

    def stops(self, loss: float) -> bool:
        if loss < self.best:  # here
            self.best = loss
            self.bad = 0
            return False
        self.bad += 1
        return self.bad > 100


def early_stopper() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        if setup.stopper.stops(loss.item()):
            raise StopIteration
        return loss

    return lambda: make_setup(stopper=Stopper()), step


def tuple_that_is_unpacked() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        seen, total = setup.counts
        setup.counts = (seen + 1, total + len(batch))
        if seen > 100:  # here
            raise StopIteration
        return loss

    return lambda: make_setup(counts=(0, 0)), step


def entry_of_a_dict() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.stats["bad"] = setup.stats.get("bad", 0) + 1
        if setup.stats.get("bad", 0) > 100:  # here
            raise StopIteration
        return loss

    return lambda: make_setup(stats={"bad": 0}), step


def tensor_of_no_dimension() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.bad += 1
        if setup.bad > 100:  # here
            raise StopIteration
        return loss

    return lambda: make_setup(bad=torch.tensor(0)), step


def best_loss_against_a_tensor() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        if loss < setup.best:  # here
            setup.best = loss.item()
        elif loss > 1000:
            raise StopIteration
        return loss

    return lambda: make_setup(best=float("inf")), step


def best_mean_of_numpy() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        mean = np.mean([loss.item()])
        if setup.best - mean > 1e-9:  # here
            setup.best = mean
        elif loss > 1000:
            raise StopIteration
        return loss

    return lambda: make_setup(best=np.float64(np.inf)), step


def best_of_single_precision() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        value = loss.detach().numpy().mean()
        if value < setup.best:  # here
            setup.best = value
        elif value > 1000:
            raise StopIteration
        return loss

    return lambda: make_setup(best=np.float32(np.inf)), step


def phase_of_training() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        if setup.step_index == 2:
            setup.phase = "main"
        if setup.phase == "polish":  # here
            setup.optimizer.param_groups[0]["lr"] = 0.001
        return loss

    return lambda: make_setup(phase="warmup"), step


def schedule_in_stairs() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        decay = 0.5 ** int(setup.count / 100)  # here
        setup.optimizer.param_groups[0]["lr"] = 0.05 * decay
        return train(setup, batch)

    return lambda: make_setup(count=0), step


def counter_at_another_place_of_its_cycle() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        loss = train(setup, batch)
        if setup.count % 100 == 0:  # here
            setup.optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    return lambda: make_setup(count=0), step


def loop_that_saves_for_itself() -> Loop:
    """The value goes through a file of the loop's own, which torch.load() reads with its defaults."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.count += 1
        torch.save({"count": setup.count}, setup.file)
        torch.load(setup.file)
        if setup.count > 100:  # here
            raise StopIteration
        return loss

    return lambda: make_setup(count=0, file="count.pt"), step


STILL = "; still different at the end of the run"
DECIDING: dict[Callable[[], Loop], tuple[str, str]] = {
    early_stopper: ("setup.stopper.best", "2.1956 when saved, inf after loading"),
    tuple_that_is_unpacked: ("setup.counts[0]", "4 when saved, 0 after loading" + STILL),
    entry_of_a_dict: ("setup.stats.bad", "4 when saved, 0 after loading" + STILL),
    tensor_of_no_dimension: ("setup.bad", "4 when saved, 0 after loading" + STILL),
    best_loss_against_a_tensor: ("setup.best", "2.1956 when saved, inf after loading"),
    best_mean_of_numpy: ("setup.best", "2.1956 when saved, inf after loading"),
    best_of_single_precision: (
        "setup.best",
        f"{np.float32(2.1956007)!r} when saved, {np.float32(np.inf)!r} after loading",  # as this numpy writes them
    ),
    phase_of_training: ("setup.phase", "'main' when saved, 'warmup' after loading" + STILL),
    schedule_in_stairs: ("setup.count", "4 when saved, 0 after loading" + STILL),
    counter_at_another_place_of_its_cycle: ("setup.count", "4 when saved, 0 after loading" + STILL),
    loop_that_saves_for_itself: ("setup.count", "4 when saved, 0 after loading" + STILL),
}

MESSAGE = """\
[attribute-not-restored] {name} {seen}; the loop decides by it (test_resume_decisions.py:{line})
  cause: training changes it, and the checkpoint does not carry it; there was no effect on the losses yet
  fix: save {name} in the checkpoint and set it again in load()"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("loop", DECIDING, ids=lambda loop: loop.__name__)
def test_a_lost_value_by_which_the_loop_decides_is_a_finding(loop: Callable[[], Loop]) -> None:
    """The whole finding: what was lost, and the line that decides by it, whatever way the value takes to there."""
    name, seen = DECIDING[loop]
    where = Stopper.stops if loop is early_stopper else loop
    report = check(loop)
    line = line_of(where, "# here")
    assert [str(finding) for finding in report.findings] == [MESSAGE.format(name=name, seen=seen, line=line)]


@pytest.mark.parametrize("loop", DECIDING, ids=lambda loop: loop.__name__)
def test_the_defaults_lose_no_such_value(loop: Callable[[], Loop]) -> None:
    """save_training_state() and load_training_state() carry every one of these but an object of the person's own."""
    report = check(loop, save=None, load=None)
    assert report.ok is (loop is not early_stopper), str(report)


# -- values that only show something, or were lost at the same place -----------------------------------------------


def same_place_of_a_cycle() -> Loop:
    """The resume is before step 4: a counter modulo 2 begins anew where it was."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        if setup.count % 2 == 0:
            batch = -batch[:4]
        return train(setup, batch)

    return lambda: make_setup(count=0), step


def printed_every_so_often() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        loss = train(setup, batch)
        if setup.count % 100 == 0:
            print(loss)
        return loss

    return lambda: make_setup(count=0), step


def shown_since_the_last() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        loss = train(setup, batch)
        if setup.count - setup.last >= 3:
            print(loss)
            setup.last = setup.count
        return loss

    return lambda: make_setup(count=0, last=0), step


def smoothed_for_a_line() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        value = loss.item()
        setup.smooth = value if setup.smooth is None else 0.9 * setup.smooth + 0.1 * value
        setup.peak = max(setup.peak, value)
        return loss

    return lambda: make_setup(smooth=None, peak=0.0), step


def formatted_and_written() -> Loop:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.count += 1
        setup.line = f"{setup.count:>6} {setup.count / 3:.2f}"
        return train(setup, batch)

    return lambda: make_setup(count=0, line=""), step


SHOWING = [same_place_of_a_cycle, printed_every_so_often, shown_since_the_last, smoothed_for_a_line]
SHOWING.append(formatted_and_written)


@pytest.mark.parametrize("loop", SHOWING, ids=lambda loop: loop.__name__)
def test_a_lost_value_that_decides_nothing_is_no_finding(loop: Callable[[], Loop]) -> None:
    """Counters for output, averages and peaks, and a counter lost at the same place of its cycle."""
    report = check(loop)
    assert report.findings == (), str(report)
    assert {difference.piece.kind for difference in report.state_differences} >= {"attribute"}


def test_the_same_counter_at_another_place_of_its_cycle() -> None:
    """Resumed before step 5, the counter modulo 2 is one off: the runs part by it."""
    report = check(same_place_of_a_cycle, resume_at=5)
    (finding,) = report.findings
    assert finding.rule == "attribute-not-restored"
    assert finding.seen.startswith("setup.count 5 when saved, 0 after loading; the runs part at step 5: ")


# -- decisions that came out otherwise without effect ----------------------------------------------------------------


def evaluates_now_and_then() -> Loop:
    """A counter of its own triggers an evaluation, which changes nothing that is trained."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.since += 1
        if setup.since >= 3:
            with torch.no_grad():
                setup.scores = [*setup.scores, float(setup.model(X).mean())]
            setup.since = 0
        return loss

    return lambda: make_setup(since=0, scores=[]), step


def evaluates_and_goes_on_a_level() -> Loop:
    """The same counter, and the evaluation is followed by a change that lasts."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.since += 1
        if setup.since >= 6:
            setup.level = setup.level + 1
            setup.since = 0
        return loss

    return lambda: make_setup(since=0, level=0), step


def test_a_decision_that_came_out_otherwise_without_effect_is_a_note() -> None:
    """The evaluation falls on other steps after the resume, and nothing else is different at the end."""
    report = check(evaluates_now_and_then)
    assert report.findings == ()
    assert [note.evidence["piece"] for note in report.notes] == ["setup.since", "setup.scores"]


def test_a_decision_that_came_out_otherwise_with_effect_is_a_finding() -> None:
    """The counter decides when something that was not lost changes."""
    report = check(evaluates_and_goes_on_a_level)
    assert [finding.rule for finding in report.findings] == ["attribute-not-restored"]
    assert report.findings[0].seen.startswith("setup.since 4 when saved, 0 after loading")
