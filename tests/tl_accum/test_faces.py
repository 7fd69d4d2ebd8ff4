"""Both faces of the check, its report and its errors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import AccumulationReport, assert_accumulation_equivalent, check_accumulation_equivalent
from tl_core import CheckFailed, NotJudged, TrainingSetup, standard_step


def data() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make_step(k: int) -> Any:
    return standard_step(loss_fn, accumulation_steps=k)


def undivided(k: int) -> Any:
    def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
        loss = loss_fn(setup.model, batch)
        loss.backward()
        if (setup.step_index + 1) % k == 0:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss

    return step


def test_both_faces() -> None:
    """One returns the report; the other returns it when all is well, and raises it else."""
    assert isinstance(assert_accumulation_equivalent(make_setup, data(), make_step), AccumulationReport)
    report = check_accumulation_equivalent(make_setup, data(), undivided)
    with pytest.raises(CheckFailed) as caught:
        assert_accumulation_equivalent(make_setup, data(), undivided)
    assert str(caught.value) == str(report) == str(caught.value.report)
    assert caught.value.findings == report.findings


def normed() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_cannot_be_judged_raises_with_its_report() -> None:
    """NotJudged is no CheckFailed, and says why."""
    with pytest.raises(NotJudged) as caught:
        assert_accumulation_equivalent(normed, data(), make_step)
    report = caught.value.report
    assert (report.ok, report.judged, report.findings) == (False, False, ())
    assert [note.rule for note in report.notes] == ["not-judged"]


@pytest.mark.parametrize("step", [make_step, undivided], ids=["passed", "failed"])
def test_the_report_has_its_figures(step: Any) -> None:
    """For programs: what was compared, and where it differs."""
    report = check_accumulation_equivalent(make_setup, [data()] * 3, step, accumulation_steps=2, cycles=3)
    assert (report.check, report.accumulation_steps, report.cycles) == ("Gradient accumulation", 2, 3)
    assert (report.noise, report.data_form) == (0.0, "a list of 3 batches")
    assert report.diverged_at == (None if step is make_step else 0)
    assert report.judged


def test_reports_and_errors_can_be_pickled() -> None:
    """pytest-xdist sends them from process to process."""
    report = check_accumulation_equivalent(make_setup, data(), undivided)
    again = pickle.loads(pickle.dumps(report))
    assert (type(again), str(again), again.diverged_at) == (AccumulationReport, str(report), 0)
    with pytest.raises(NotJudged) as caught:
        assert_accumulation_equivalent(normed, data(), make_step)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), str(error)) == (NotJudged, str(caught.value))


def test_an_allowed_rule_is_no_finding() -> None:
    """allow= silences one rule by name, in both faces."""
    report = assert_accumulation_equivalent(make_setup, data(), undivided, allow=["loss-not-divided"])
    assert report.findings == ()
