"""What assert_lr says of rates that differ from the expected ones: the shift, factor or unit that explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import CheckFailed, TrainingSetup
from tl_telemetry import TrainingRun, run_training

Factor = Callable[[int], float]


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 6)


def run(factor: Factor | None, *, lr: float = 0.1, calls: int = 1, every: int = 1) -> TrainingRun:
    """Train 8 steps; a LambdaLR of ``factor`` steps ``calls`` times after every ``every``-th update."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return TrainingSetup(model, optimizer, lr_scheduler.LambdaLR(optimizer, factor) if factor else None)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = setup.model(batch).square().mean()
        loss.backward()
        setup.optimizer.step()
        if factor and (setup.step_index + 1) % every == 0:
            for _ in range(calls):
                setup.scheduler.step()
        return loss

    return run_training(make_setup, torch.ones(4, 3), step, steps=8)


FACTOR = (
    "another base rate, or a factor (accumulation, world size, batch size) that is applied once too often or too rarely"
)
AHEAD = (
    "the schedule runs 1 step ahead of the expectation: it was ahead before the first step of the run (stepped before "
    "the loop, or resumed), or the expectation counts from another step"
)
EXPLAINED = {
    "two calls a step": (
        lambda: run(warmup, calls=2),
        warmup,
        "the schedule runs 2 times too fast: scheduler.step() is called 2 times a step (16 calls in 8 steps), "
        "in every micro-batch or in two places, or the expectation counts a larger unit",
    ),
    "a call in every other step": (
        lambda: run(warmup, every=2),
        warmup,
        "the schedule moves once in 2 steps, the expectation in each: scheduler.step() is called once an update of "
        "several micro-batches, or once an epoch",
    ),
    "never called": (
        lambda: run(warmup, every=100),
        warmup,
        "'scheduler' never stepped in the run, so that the rate stays at its first value",
    ),
    "no scheduler": (
        lambda: run(None),
        warmup,
        "the rate never moves, and no scheduler of the setup drives it",
    ),
    "a flat schedule": (
        lambda: run(lambda step: 1.0),
        warmup,
        "'scheduler' steps, but the rate never moves: the schedule is flat here, or something sets the rate back",
    ),
    "another base rate": (
        lambda: run(warmup, lr=0.4),
        warmup,
        f"every rate is 4 times the expected one: {FACTOR}",
    ),
    "another constant": (
        lambda: run(None, lr=0.4),
        lambda step: 1.0,
        f"every rate is 4 times the expected one: {FACTOR}",
    ),
    "ahead": (lambda: run(lambda step: warmup(step + 1)), warmup, AHEAD),
    "behind": (
        lambda: run(lambda step: step / 6 if step < 6 else 1.0),
        warmup,
        "the schedule lags 1 step behind the expectation",
    ),
    "ahead or from another base rate": (
        lambda: run(lambda step: 0.9 ** (step + 1)),
        lambda step: 0.9**step,
        f"undecided, both explain every rate: {AHEAD}; or every rate is 0.9 times the expected one: {FACTOR}",
    ),
    "a length in another unit": (
        lambda: run(lambda step: warmup(2 * step)),
        warmup,
        "the schedule runs 2 times too fast, although scheduler.step() is called no more than once a step (8 calls in "
        "8 steps): its length (T_max, total_steps, a warmup) counts another unit, such as epochs or accumulated "
        "updates",
    ),
    "another shape": (
        lambda: run(lambda step: 0.5**step),
        warmup,
        "undecided: no shift, factor or unit explains the difference",
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_difference_is_explained(name: str) -> None:
    """A difference is explained by what makes every rate the expected one, and by nothing else."""
    make_run, expected, cause = EXPLAINED[name]
    with pytest.raises(CheckFailed) as caught:
        make_run().assert_lr(lambda step: 0.1 * expected(step))
    (finding,) = caught.value.findings
    assert finding.cause == cause


def test_expected_rates_pass() -> None:
    """A schedule as expected passes, and the run is returned."""
    healthy = run(warmup)
    assert healthy.assert_lr(lambda step: 0.1 * warmup(step)) is healthy


def two_players(*, write: bool = False) -> TrainingRun:
    """Train two models; both schedulers drive the first one's optimizer, and ``write`` sets the second's ``lr``."""

    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}
        schedulers = {name: lr_scheduler.ExponentialLR(optimizers["a"], 0.9) for name in model}
        return TrainingSetup(model, optimizers, schedulers)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.model.zero_grad()
        loss = sum(part(batch).square().mean() for part in setup.model.values())
        loss.backward()
        for name, optimizer in setup.optimizers.items():
            optimizer.step()
            setup.schedulers[name].step()
        if write:
            setup.optimizers["b"].lr = 0.1 * 0.9**setup.step_index
        return loss

    return run_training(make_setup, torch.ones(4, 3), step, steps=8)


def cause_and_fix(made: TrainingRun, optimizer: str | None = None) -> tuple[str, str]:
    with pytest.raises(CheckFailed) as caught:
        made.assert_lr(lambda step: 0.1 * 0.9**step, optimizer=optimizer)
    (finding,) = caught.value.findings
    return finding.cause, finding.fix


def test_schedulers_of_another_optimizer_are_named() -> None:
    """Where nothing drives a rate, what the schedulers do drive is said."""
    assert cause_and_fix(two_players(), "b") == (
        "the rate never moves, and no scheduler of the setup drives it ('a' drives 'a', 'b' drives 'a')",
        "give the optimizer its scheduler, and call its step() after optimizer.step(); a loop that sets rates by hand "
        "must write to optimizer.param_groups[...]['lr']",
    )


def test_attribute_that_nobody_reads() -> None:
    """A loop that writes the rate to an attribute of the optimizer is told where it belongs."""
    assert cause_and_fix(two_players(write=True), "b") == (
        "the rate never moves: something writes optimizer.lr, which SGD does not read",
        "write to each of optimizer.param_groups: group['lr'] = rate",
    )


def test_scheduler_of_a_replaced_optimizer() -> None:
    """A scheduler that drives the optimizer from before is the cause of rates that do not move any more."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        if setup.step_index == 3:
            setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
        setup.optimizer.zero_grad()
        loss = setup.model(batch).square().mean()
        loss.backward()
        setup.optimizer.step()
        setup.scheduler.step()
        return loss

    assert cause_and_fix(run_training(make_setup, torch.ones(4, 3), step, steps=8)) == (
        "'scheduler' steps, but the SGD that it drives is not in the setup: the optimizer that steps was built after "
        "the scheduler, which still holds the one before: nothing drives its rates",
        "build the scheduler for the optimizer that steps, or change that one in place (add_param_group)",
    )


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("lr", [0.1, None])
def test_scheduler_of_an_optimizer_that_never_stepped(lr: float | None) -> None:
    """A scheduler of an optimizer built twice is seen from the first step on, unless the loop sets the rates itself."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(3, 1)
        scheduler = lr_scheduler.ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.9)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scheduler)

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.param_groups[0]["lr"] = lr or 0.1 / (1 + setup.step_index)
        setup.optimizer.zero_grad()
        loss = setup.model(batch).square().mean()
        loss.backward()
        setup.optimizer.step()
        setup.scheduler.step()
        return loss

    findings = run_training(make_setup, torch.ones(4, 3), step, steps=8).check().findings
    assert [finding.seen for finding in findings if finding.rule == "orphan-scheduler"] == (
        [
            "'scheduler' (ExponentialLR) stepped 8 times, but the SGD that it drives is not in the setup, and never "
            "stepped; the learning rate of 'optimizer' stayed at 0.1 in 8 updates"
        ]
        if lr
        else []
    )
