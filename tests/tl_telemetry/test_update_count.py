"""What explains a number of updates that was not expected: what the run shows of its accumulation groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tl_core import CheckFailed, TrainingSetup
from tl_telemetry import num_updates, run_training

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
UNDECIDED = (
    "undecided: accumulation over another number of micro-batches than expected, or a last group that is dropped or "
    "added"
)


def epochs(last_group: str, *, steps: int = 30, passes: int = 1, skip: bool = False) -> Any:
    """Train in epochs of 10 micro-batches, in groups of 4, and treat an epoch's last group of 2 as asked."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 2)
        critic = torch.optim.SGD([model.bias], lr=0.01)  # steps in every micro-batch
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126 if skip else 1.0, backoff_factor=1e-20)
        optimizers = {"main": torch.optim.SGD([model.weight], lr=0.01), "critic": critic}
        setup = TrainingSetup(model, optimizers, scaler=scaler)
        setup.pending = 0
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        main, critic = setup.optimizers.values()
        place = setup.step_index % 10
        setup.model.bias.square().sum().backward()
        critic.step()
        critic.zero_grad()
        if place == 0 and last_group == "drop":
            main.zero_grad()
            setup.pending = 0
        for _ in range(passes):
            loss = (batch @ setup.model.weight.T).square().mean() * 10
            setup.scaler.scale(loss).backward()
        setup.pending += 1
        if setup.pending == 4 or (last_group == "step" and place == 9):
            setup.scaler.step(main)
            setup.scaler.update()
            main.zero_grad()
            setup.pending = 0
        return loss

    return run_training(make_setup, X, step, steps=steps)


def cause(run: Any, expected: int) -> str:
    with pytest.raises(CheckFailed) as caught:
        run.assert_num_updates({"main": expected})
    (finding,) = caught.value.findings
    assert finding.rule == "update-count"
    return finding.cause


def plan(last_group: str) -> int:
    return num_updates(80, 8, epochs=3, accumulation_steps=4, last_group=last_group)


@pytest.mark.parametrize("last_group", ["step", "drop", "carry"])
def test_the_plan_of_the_loop_passes(last_group: str) -> None:
    """num_updates with what the loop does to its last groups is what the run has."""
    epochs(last_group).assert_num_updates({"main": plan(last_group), "critic": 30})


SHORT = "incomplete groups are stepped: 3 of the updates took fewer than 4 backward passes (steps 9, 19, 29)"
LOST = (
    "incomplete groups are dropped: 6 backward passes (steps 8-9, 18-19, 28-29) went into no update, the others 4 an "
    "update"
)
CAUSES = {
    ("step", "drop"): f"{SHORT}; without them there would be 6, as num_updates(last_group='drop') counts",
    ("step", "carry"): f"{SHORT}; completed to 4 there would be 7, as num_updates(last_group='carry') counts",
    ("drop", "step"): f"{LOST}; with an update of each such group there would be 9, as num_updates(last_group='step') "
    "counts",
    ("drop", "carry"): f"{LOST}; completed to 4 there would be 7, as num_updates(last_group='carry') counts",
}


@pytest.mark.parametrize(("loop", "planned"), CAUSES)
def test_what_became_of_incomplete_groups_is_named(loop: str, planned: str) -> None:
    """Stepped or dropped, with the steps, and the plan that the expected number fits."""
    assert cause(epochs(loop), plan(planned)) == CAUSES[loop, planned]


def test_a_group_at_the_end_may_go_on() -> None:
    """What is left over at the run's end is only said to be in no update: a longer run might complete it."""
    assert cause(epochs("carry", steps=10), 3) == (
        "2 backward passes (steps 8-9) went into no update, the others 4 an update; with an update of each such group "
        "there would be 3, as num_updates(last_group='step') counts"
    )


def test_passes_are_counted_and_not_steps() -> None:
    """Two backward passes a micro-batch make groups of 8."""
    assert cause(epochs("step", passes=2), 6) == (
        "incomplete groups are stepped: 3 of the updates took fewer than 8 backward passes (steps 9, 19, 29); without "
        "them there would be 6, as num_updates(last_group='drop') counts"
    )


@pytest.mark.parametrize(("loop", "expected"), [("step", 8), ("drop", 8), ("carry", 9)])
def test_numbers_that_do_not_fit_stay_undecided(loop: str, expected: int) -> None:
    """Another number than the groups explain has no cause that the run shows."""
    assert cause(epochs(loop), expected) == UNDECIDED


def test_another_accumulation_is_still_told() -> None:
    """A number that another group size explains is explained by that."""
    assert cause(epochs("carry"), 10) == (
        "each update of 'main' took the gradients of 4 backward passes; 10 updates of the 30 passes of this run would "
        "take 3 each"
    )


def test_updates_that_a_scaler_skipped_are_no_dropped_groups() -> None:
    """The gradients of a skipped update went into none, and the message says that it was skipped."""
    run = epochs("carry", steps=28, skip=True)
    assert run.setup.scaler.get_scale() < 2.0**126
    assert cause(run, 7) == "a GradScaler skipped 1 update (step 3)"
