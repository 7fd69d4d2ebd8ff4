"""Both runs: what each step gets, what is taken over between cycles, and what counts as a gap."""

from __future__ import annotations

import math
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import _session, check_accumulation_equivalent
from tl_accum._compare import Comparison, compare, compare_frozen
from tl_accum._differences import GroupGap
from tl_accum._plan import make_plan
from tl_accum._runs import GroupRun
from tl_accum._session import Session
from tl_accum._tolerance import Bounds
from tl_core import TrainingSetup
from tl_telemetry import Piece, StateCapture

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
PASSED = "Gradient accumulation: passed"
Step = Callable[[TrainingSetup, Any], Any]
Act = Callable[[TrainingSetup], None]


def make_setup() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def nothing(setup: TrainingSetup) -> None:
    """Do nothing."""


def usual(
    *, each: Act = nothing, after: Act = nothing, divisor: int | None = None, loss_fn: Any = squared
) -> Callable[[int], Step]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = loss_fn(setup.model, batch)
            (loss / (divisor or k)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                after(setup)
            each(setup)
            return loss.detach()

        return step

    return make_step


def session_of(make_step: Callable[[int], Step], build: Callable[[], Any] = make_setup, **changed: Any) -> Session:
    given: dict[str, Any] = {
        "accumulation_steps": 4,
        "cycles": 2,
        "epoch_length": None,
        "split": None,
        "disable_dropout": True,
        "device": "cpu",
        "seed": 0,
        **changed,
    }
    return Session(make_plan(build, X, make_step, **given))


def compared(*args: Any, **changed: Any) -> Comparison:
    session = session_of(*args, **changed)
    try:
        return compare(session, Bounds(1e-4, 1e-6))
    finally:
        session.close()


def weights(capture: StateCapture) -> dict[Any, Tensor]:
    return dict(capture.contents(Piece("weights")))


def same(a: StateCapture, b: StateCapture) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def starts_alike(a: list[GroupRun], b: list[GroupRun]) -> list[bool]:
    return [same(x.start, y.start) for x, y in zip(a, b, strict=True)]


def test_after_a_cycle_that_agrees_the_next_one_starts_from_the_same_weights() -> None:
    """Bit for bit, so that rounding does not add up."""
    found = compared(usual(), cycles=4)
    assert found.agrees
    assert starts_alike(found.reference.groups, found.run.groups) == [True] * 4
    assert not all(same(a.end, b.end) for a, b in zip(found.reference.groups, found.run.groups, strict=True))


def test_after_a_cycle_that_differs_the_weights_stay_as_they_are() -> None:
    """What follows from a mistake is the loop's own."""
    found = compared(usual(divisor=1), cycles=3)
    assert starts_alike(found.reference.groups, found.run.groups) == [True, False, False]
    assert [gap.in_step for gap in found.gaps] == [False, False, False]


def test_rounding_does_not_add_up_over_many_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that multiplies every difference passes all the same; without the weights taken over, it would not."""

    def steep() -> Any:
        model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    make_step = usual(loss_fn=lambda model, batch: (3 * model(batch)).sin().mean())
    assert compared(make_step, steep, cycles=12).agrees
    monkeypatch.setattr(_session, "_take_over", lambda capture, setup: None)
    assert not compared(make_step, steep, cycles=12).agrees


def test_steps_get_the_index_of_the_micro_batch_or_of_the_cycle() -> None:
    """setup.step_index counts calls, in both runs."""
    seen: SimpleQueue[int] = SimpleQueue()
    compared(usual(each=lambda setup: seen.put(setup.step_index)))
    assert [seen.get() for _ in range(seen.qsize())] == [0, 1, *range(8)]


def test_each_full_batch_starts_from_zeroed_gradients() -> None:
    """A loop that never clears its gradients has a reference all the same."""

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
            return loss.detach()

        return step

    found = compared(make_step)
    for group in found.reference.groups:
        assert all(not act.before for act in group.steps[0].acts[:1])
    assert [gap.agrees for gap in found.gaps] == [True, False]


def test_a_gap_says_which_parameters_differ_and_where_most() -> None:
    """The element that lies furthest apart, with both values."""
    found = compared(usual(divisor=1))
    (gap,) = found.gaps[0].gradients
    assert (gap.optimizer, gap.before_clipping) == ("optimizer", True)
    assert [one.name for one in gap.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for one in gap.parameters:
        expected = gap.expected.accumulated[one.name]
        assert abs(one.expected) == pytest.approx(float(expected.abs().max()))
        assert one.got == pytest.approx(4 * one.expected, rel=1e-3)


def parts_of(gap: GroupGap) -> list[str]:
    names = ("timing", "gradients", "weights", "buffers", "settings", "schedulers", "state")
    return [name for name in names if getattr(gap, name)]


def drift(setup: TrainingSetup) -> None:
    for parameter in setup.model.parameters():
        parameter.data.mul_(0.9)


def decay(setup: TrainingSetup) -> None:
    setup.optimizer.param_groups[0]["lr"] *= 0.5


def follow(setup: TrainingSetup) -> None:
    for name, parameter in setup.model.named_parameters():
        setup.state["ema"][name].lerp_(parameter.detach(), 0.1)


def with_average() -> Any:
    model, optimizer = make_setup()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return TrainingSetup(model, optimizer, state={"ema": average})


def with_scheduler() -> Any:
    model, optimizer = make_setup()
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def early(k: int) -> Step:
    """Update at the first micro-batch of each group."""

    def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
        loss = squared(setup.model, batch)
        (loss / k).backward()
        if setup.step_index % k == 0:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("build", "make_step", "expected"),
    [
        (make_setup, usual(), []),
        (make_setup, early, ["timing", "weights"]),
        (make_setup, usual(divisor=1), ["gradients", "weights"]),
        (make_setup, usual(each=decay), ["weights", "settings"]),
        (make_setup, usual(after=decay), []),
        pytest.param(
            with_scheduler,
            usual(each=lambda setup: setup.scheduler.step()),
            ["schedulers"],
            # torch sees it too, in the first micro-batch
            marks=pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
        ),
        (with_scheduler, usual(after=lambda setup: setup.scheduler.step()), []),
        (with_average, usual(each=follow), ["state"]),
        (with_average, usual(after=follow), []),
    ],
    ids=[
        "correct",
        "early",
        "undivided",
        "rate per micro-batch",
        "rate per update",
        "scheduler per micro-batch",
        "scheduler per update",
        "average per micro-batch",
        "average per update",
    ],
)
def test_gaps_are_told_apart_by_what_differs(
    build: Callable[[], Any], make_step: Callable[[int], Step], expected: list[str]
) -> None:
    """In the first cycle that differs."""
    found = compared(make_step, build)
    assert next((parts_of(gap) for gap in found.gaps if not gap.agrees), []) == expected
    assert found.agrees == (expected == [])


def test_a_scheduler_that_steps_at_an_epochs_end_passes() -> None:
    """The reference's step index is that of the epoch's last micro-batch there."""

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            if (setup.step_index + 1) % 8 == 0:
                setup.scheduler.step()
            return loss.detach()

        return step

    def halving() -> Any:
        model, optimizer = make_setup()
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    found = compared(make_step, halving, epoch_length=8, cycles=4)
    assert found.agrees
    assert found.indices == (0, 7, 11, 15)
    rates = [group.steps[-1].record.lrs["optimizer"][0] for group in found.run.groups]
    assert rates == [0.1, 0.1, 0.05, 0.05]


def test_what_draws_random_numbers_draws_the_same_in_both_runs() -> None:
    """One mask by hand, drawn for each feature, is one mask for a batch and for its micro-batches."""

    def make_step(k: int) -> Step:
        inner = usual()(k)

        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            if setup.step_index % k == 0:
                setup.mask = torch.rand(3) > 0.5
            return inner(setup, batch * setup.mask)

        return step

    assert str(check_accumulation_equivalent(make_setup, X, make_step, cycles=3)) == PASSED


def test_a_loop_that_repeats_has_no_floor() -> None:
    """Where it differs from the full batch, it is run again to know."""
    found = compared(usual(divisor=1))
    assert (found.noise, found.spread, dict(found.bounds.floor), found.drew) == (0.0, 0.0, {}, False)


def test_the_floor_is_measured_by_parameter() -> None:
    """A parameter whose gradient does not depend on what is drawn has none."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steady, self.shaken = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.steady(x), self.shaken(x + 0.01 * torch.randn_like(x))

    def build() -> Any:
        model = Partly()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = sum(out.square().mean() for out in setup.model(batch))
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    found = compared(make_step, build)
    floor = found.bounds.floor
    assert found.drew
    assert found.agrees
    assert 0.0 < found.noise < 0.5
    assert floor["steady.weight"] == floor["steady.bias"] == 0.0
    assert floor["shaken.weight"] > 0.0


def test_without_batch_statistics_nothing_runs_again_with_fixed_ones() -> None:
    """There is nothing to fix."""
    session = session_of(usual(divisor=1))
    try:
        assert compare_frozen(compare(session, Bounds(1e-4, 1e-6))) is None
    finally:
        session.close()


def test_layers_that_move_statistics_are_fixed_by_name() -> None:
    """Those whose buffers move in forward passes; a frozen one among them stays out."""

    def normed() -> Any:
        norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
        model = nn.Sequential(nn.Linear(3, 4), norms[0], norms[1], nn.Linear(4, 1))
        norms[1].eval()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    session = session_of(usual(), normed)
    try:
        found = compare(session, Bounds(1e-4, 1e-6))
        fixed = compare_frozen(found)
    finally:
        session.close()
    assert not found.agrees
    assert fixed is not None
    assert fixed.agrees
    assert (fixed.frozen.batch_norm, fixed.frozen.modules) == (True, ("1",))


def test_numbers_that_are_not_finite_differ_from_those_that_are() -> None:
    """NaN where the full batch has none is a gap; NaN in both is none."""

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            (loss / k * (math.nan if k > 1 else 1.0)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    (gap,) = compared(make_step, cycles=1).gaps[0].gradients
    assert all(math.isnan(one.got) for one in gap.parameters)
    both = compared(lambda k: make_step(4) if k > 1 else usual(divisor=1)(1), cycles=1)
    assert both.gaps[0].gradients
