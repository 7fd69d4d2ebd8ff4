from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import observe


@pytest.fixture(scope="module")
def run():
    """Two optimizers, of which one steps in every second step; the last gradient is not finite."""
    model = nn.Module()
    model.a = nn.Parameter(torch.tensor([1.0]))
    model.b = nn.Parameter(torch.tensor([1.0]))
    optimizers = {"often": torch.optim.SGD([model.a], lr=0.5), "seldom": torch.optim.SGD([model.b], lr=0.25)}
    setup = TrainingSetup(model, optimizers)
    with observe(setup) as run:
        for index in range(2):
            with run.step(torch.zeros(3, 1)) as step:
                loss = (2 * model.a + (math.inf if index else 3.0) * model.b).sum()
                loss.backward()
                optimizers["often"].step()
                optimizers["often"].zero_grad()
                if index:
                    optimizers["seldom"].step()
                step.loss = {"loss": loss, "half": loss / 2}
    return run


FIRST = {
    "step": 0,
    "num_examples": 3,
    "loss": 5.0,
    "loss.loss": 5.0,
    "loss.half": 2.5,
    "grad_norm_before_clip.often": 2.0,
    "grad_norm.often": 2.0,
    "update_norm.often": 1.0,
    "lr.often.0": 0.5,
    "optimizer_steps.often": 1,
    "grad_norm_before_clip.seldom": None,
    "grad_norm.seldom": None,
    "update_norm.seldom": None,
    "lr.seldom.0": 0.25,
    "optimizer_steps.seldom": 0,
    "skipped": False,
    "loss_scale": None,
    "nonfinite_grads": [],
    "events": ["backward", "optimizer_step", "zero_grad"],
}


def test_rows_are_flat_dicts_with_the_same_columns(run):
    """One flat dict a step, with plain python values; each has the same keys."""
    first, second = run.rows()
    assert first == FIRST
    assert list(second) == list(first)
    assert second["grad_norm.seldom"] == math.inf
    assert second["nonfinite_grads"] == ["b"]
    assert second["events"] == ["backward", "optimizer_step", "zero_grad", "optimizer_step"]


def test_rows_make_a_data_frame(run):
    """pandas makes a frame of them whose figures are numbers."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(run.rows())
    assert frame.shape == (2, len(FIRST))
    assert frame["grad_norm.often"].dtype == float
    assert frame["optimizer_steps.seldom"].tolist() == [0, 1]
    assert frame["grad_norm.seldom"].isna().tolist() == [True, False]


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_json_lines_are_strict_json(run, tmp_path):
    """One object a line, with the figures per parameter; NaN and Inf are strings, as JSON has no numbers for them."""
    path = tmp_path / "run.jsonl"
    run.to_jsonl(path)
    first, second = [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]
    assert first.pop("parameters") == {
        "a": {"has_grad": True, "grad_norm_before_clip": 2.0, "grad_norm": 2.0, "update_norm": 1.0},
        "b": {"has_grad": True, "grad_norm_before_clip": None, "grad_norm": None, "update_norm": None},
    }
    assert first == FIRST
    assert second["loss"] == "inf"
    assert second["parameters"]["b"] == {
        "has_grad": True,
        "grad_norm_before_clip": "inf",
        "grad_norm": "inf",
        "update_norm": "inf",
    }


def test_an_existing_file_is_written_anew(run, tmp_path):
    """Exporting twice does not append; the path may be a string."""
    path = tmp_path / "run.jsonl"
    run.to_jsonl(str(path))
    run.to_jsonl(str(path))
    assert len(path.read_text("utf-8").splitlines()) == 2


def test_columns_are_the_same_when_an_optimizer_appears_late(tmp_path):
    """An optimizer that is put into the setup during the run has its columns from then on."""
    model = nn.Linear(2, 1)
    setup = TrainingSetup(model, {"first": torch.optim.SGD([model.weight], lr=0.5)})
    with observe(setup) as run:
        for index in range(2):
            with run.step():
                if index:
                    setup.optimizers["second"] = torch.optim.SGD([model.bias], lr=0.5)
                model(torch.ones(1, 2)).sum().backward()
                for optimizer in setup.optimizers.values():
                    optimizer.step()
    first, second = run.rows()
    assert "grad_norm.second" not in first
    assert second["grad_norm.second"] == 2.0
    assert second["optimizer_steps.second"] == 1
