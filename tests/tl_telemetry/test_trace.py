"""What two runs are compared by: losses and norms, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Divergence, RunTrace, first_divergence, largest_gap

NAN, INF = math.nan, math.inf


def make_setup(*weights, model=None):
    if model is None:
        model = nn.Module()
        for index, weight in enumerate(weights):
            model.register_parameter(f"w{index}", nn.Parameter(torch.tensor([weight])))
    return TrainingSetup(model, {})


def trace(*steps):
    """Make a trace of steps, each given as what it returned, or that and the weight after it."""
    made = RunTrace()
    for index, step in enumerate(steps):
        result, weight = step if isinstance(step, tuple) else (step, 1.0)
        made.add(index, result, make_setup() if weight is None else make_setup(weight))
    return made


def test_what_a_trace_holds():
    """A trace has the losses of a step and the norms of parameters and buffers, as numbers."""
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    nn.init.constant_(model[0].weight, 2.0)
    model.register_parameter("wave", nn.Parameter(torch.tensor([3 + 4j])))
    model.register_parameter("small", nn.Parameter(torch.full((4,), 300.0).half()))
    model.register_parameter("wide", nn.Parameter(torch.tensor([1e200], dtype=torch.float64)))
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    model.register_parameter("meta", nn.Parameter(torch.empty(1, device="meta")))
    model.add_module("lazy", nn.LazyLinear(1))
    made = RunTrace()
    made.add(3, {"total": torch.tensor(1.5), "part": 2}, make_setup(model=model))
    assert made.steps == [3]
    assert made.main_loss == "total"
    assert made.losses(3) == {"total": 1.5, "part": 2.0}
    norms = made.norms(3)
    assert set(norms) == {
        *("wave", "small", "wide", "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    }
    assert norms["0.weight"] == pytest.approx(8**0.5, rel=1e-6)
    assert (norms["wave"], norms["small"], norms["wide"], norms["1.running_var"]) == (5.0, 600.0, 1e200, 1.0)


def test_a_trace_is_of_the_moment():
    """A loss or a weight that is changed later in place does not change the trace; a model without weights has none."""
    loss, setup = torch.tensor(1.0), make_setup(2.0)
    made = RunTrace()
    made.add(0, loss, setup)
    made.add(1, 5, make_setup())
    with torch.no_grad():
        loss.add_(1)
        setup.model.w0.add_(1)
    assert (made.losses(0), made.norms(0)) == ({"loss": 1.0}, {"w0": 2.0})
    assert (made.losses(1), made.norms(1)) == ({"loss": 5.0}, {})


def test_what_is_no_loss_is_refused():
    """The message is that of every runner."""
    with pytest.raises(TypeError, match=r"^step\(\) returned None at step 7; return the loss: a real tensor"):
        RunTrace().add(7, None, make_setup())
    with pytest.raises(ValueError, match=r"^step\(\) returned a tensor of shape \(2,\) at step 0; return the loss"):
        RunTrace().add(0, torch.ones(2), make_setup())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.5], Divergence(1, "loss", True, 2.0, 2.5)),
        ([1.0, (2.0, 3.0)], [1.0, (2.0, 3.5)], Divergence(1, "w0", False, 3.0, 3.5)),
        ([(1.0, 3.0), 2.0], [(1.0, 3.5), 9.0], Divergence(0, "w0", False, 3.0, 3.5)),
        ([(1.0, 3.0)], [(1.5, 3.5)], Divergence(0, "loss", True, 1.0, 1.5)),
        ([{"a": 1.0, "b": 2.0}], [{"a": 1.0}], Divergence(0, "b", True, 2.0, None)),
        ([{"a": 1.0}], [{"a": 1.0, "b": 2.0}], Divergence(0, "b", True, None, 2.0)),
        ([(1.0, 3.0)], [(1.0, None)], Divergence(0, "w0", False, 3.0, None)),
        ([NAN, INF], [NAN, INF], None),
        ([INF], [-INF], Divergence(0, "loss", True, INF, -INF)),
        ([1.0, 2.0, 3.0], [1.0], None),
        ([], [1.0], None),
    ],
)
def test_first_divergence(a, b, expected):
    """Runs part in the earliest step that both have, losses before weights; NaN equals NaN, missing differs."""
    assert first_divergence(trace(*a), trace(*b), rtol=0.0, atol=0.0) == expected


@pytest.mark.parametrize("value", [1.0, INF])
def test_a_run_that_becomes_nan_parts_there(value):
    """NaN is not close to a number nor to an infinity, whatever the tolerance."""
    found = first_divergence(trace(value), trace(NAN), rtol=1.0, atol=1e9)
    assert (found.step, found.what, found.a) == (0, "loss", value)
    assert math.isnan(found.b)


def test_tolerances_and_start_of_a_divergence():
    """The tolerance is relative to the first run; steps before the start are not compared."""
    a, b = trace(10.0, 100.0), trace(11.0, 109.0)
    assert first_divergence(a, b, rtol=0.1, atol=0.0) is None
    assert first_divergence(a, b, rtol=0.0, atol=1.0) == Divergence(1, "loss", True, 100.0, 109.0)
    assert first_divergence(a, b, rtol=0.0, atol=0.0, start=1).step == 1
    assert first_divergence(a, b, rtol=0.0, atol=0.0, start=2) is None
    assert first_divergence(trace(100.0), trace(110.5), rtol=0.1, atol=0.0) is not None
    assert first_divergence(trace(110.5), trace(100.0), rtol=0.1, atol=0.0) is None


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([2.0, 4.0], [2.5, 5.0], 0.25),
        ([-2.0], [-3.0], 0.5),
        ([(1.0, 2.0)], [(1.0, 3.0)], 0.5),
        ([NAN, INF], [NAN, INF], 0.0),
        ([NAN], [1.0], INF),
        ([1.0], [NAN], INF),
        ([1.0], [INF], INF),
        ([INF], [-INF], INF),
        ([0.0], [1e-9], INF),
        ([1e-9], [0.0], 1.0),
        ([{"a": 1.0, "b": 2.0}], [{"a": 1.0}], INF),
        ([{"a": 1.0}], [{"a": 1.0, "b": 2.0}], INF),
        ([1.0, 2.0], [1.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_largest_gap(a, b, gap):
    """The noise between two runs is the largest relative distance; endless where only one is finite, or there."""
    assert largest_gap(trace(*a), trace(*b)) == gap


def test_the_steps_before_the_stop_count():
    """Steps from the stop on are not compared."""
    a, b = trace(1.0, 1.0, 1.0), trace(1.0, 1.5, 9.0)
    assert [largest_gap(a, b, stop=stop) for stop in (0, 1, 2, None)] == [0.0, 0.0, 0.5, 8.0]
