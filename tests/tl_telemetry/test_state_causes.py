"""Rules about state beside the weights, on what their own cases do not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_core import Finding, TrainingSetup
from tl_telemetry import run_training

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

Step = Callable[[TrainingSetup, Any], Any]


def only_finding(make_setup: Callable[[], TrainingSetup], step: Step, steps: int = 8) -> Finding:
    (finding,) = run_training(make_setup, (X, Y), step, steps=steps).check().findings
    return finding


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())


def test_statistics_of_a_teacher_in_the_state() -> None:
    """BatchNorm of a frozen module beside the model is seen, and named by its place in the setup."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 8)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.teacher = encoder().requires_grad_(False)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        with torch.no_grad():
            target = setup.teacher(batch[0])
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - target).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    finding = only_finding(make_setup, step)
    assert finding.rule == "frozen-buffer-moved"
    assert finding.parameters == (
        "teacher.1.running_mean",
        "teacher.1.running_var",
        "teacher.1.num_batches_tracked",
    )


def test_statistics_of_a_frozen_part_that_is_fed_by_a_trained_one() -> None:
    """A wholly frozen part in training mode is seen although what flows in is trained (a perceptual loss)."""

    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 6), encoder().requires_grad_(False))
        return TrainingSetup(model, torch.optim.SGD(model[0].parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    assert only_finding(make_setup, step).parameters[0] == "1.1.running_mean"
