"""Warnings are evidence whatever a person's filters say, and are shown as those filters say."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tl_core import TrainingSetup
from tl_telemetry import TrainingRun, run_training

BROADCAST = "Using a target size"


def make_setup() -> TrainingSetup:
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def broadcasting_step(setup: TrainingSetup, x: torch.Tensor) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = F.mse_loss(setup.model(x), x[:, 0])
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def run() -> TrainingRun:
    return run_training(make_setup, torch.ones(4, 3), broadcasting_step, steps=3)


def rules(watched: TrainingRun) -> list[str]:
    return [finding.rule for finding in watched.findings]


def test_a_silenced_warning_is_heard_and_stays_silent() -> None:
    """Under a filter that ignores warnings, the rule finds its evidence and nothing is shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        assert rules(run()) == ["loss-broadcast"]
    assert shown == []


def test_a_warning_is_shown_as_often_as_the_filters_say() -> None:
    """The filter "always" shows it in every step, "default" once."""
    for action, times in (("always", 3), ("default", 1)):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter(action)
            run()
        assert [str(w.message).startswith(BROADCAST) for w in shown] == [True] * times


def test_a_warning_that_is_an_error_is_raised_in_the_loop() -> None:
    """Under a filter that makes warnings errors, the step raises as it would unwatched."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=BROADCAST):
            run()


def test_a_second_run_hears_what_the_first_one_heard() -> None:
    """Python shows a warning once a line; every run finds it all the same."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        assert [rules(run()), rules(run())] == [["loss-broadcast"]] * 2


def test_filters_and_showwarning_are_put_back_after_an_error() -> None:
    """A loop that raises leaves the person's filters and warnings.showwarning as they were."""

    def failing(setup: TrainingSetup, x: torch.Tensor) -> torch.Tensor:
        assert warnings.filters != before
        raise RuntimeError("in the loop")

    with warnings.catch_warnings():
        before, show = list(warnings.filters), warnings.showwarning
        with pytest.raises(RuntimeError, match="in the loop"):
            run_training(make_setup, torch.ones(4, 3), failing)
        assert (warnings.filters, warnings.showwarning) == (before, show)
