from __future__ import annotations

import pytest
import torch

from tl_core import Tolerance, Tolerances


def test_the_defaults():
    """Each comparing check has its named tolerance, the same on all devices."""
    assert Tolerances().get("training_resume") == Tolerance(rtol=1e-5, atol=1e-6)
    assert Tolerances().get("grad_accumulation", "cuda:1") == Tolerance(rtol=1e-4, atol=1e-6)


def test_overrides_apply_in_order():
    """A call goes before a device, a device before the name, the name before the default."""
    tolerances = Tolerances({"training_resume": {"rtol": 1e-3, "cuda": {"atol": 1e-2}}})
    assert tolerances.get("training_resume") == Tolerance(1e-3, 1e-6)
    assert tolerances.get("training_resume", torch.device("cuda", 0)) == Tolerance(1e-3, 1e-2)
    assert tolerances.get("training_resume", "cuda", rtol=0.5) == Tolerance(0.5, 1e-2)
    assert tolerances.get("training_resume", atol=0) == Tolerance(1e-3, 0.0)
    assert tolerances.get("grad_accumulation") == Tolerance(1e-4, 1e-6)


def test_an_override_may_be_a_tolerance():
    """A Tolerance replaces both numbers, in general or for one device."""
    assert Tolerances({"training_resume": Tolerance(0.1, 0.2)}).get("training_resume") == Tolerance(0.1, 0.2)
    nested = Tolerances({"training_resume": {"mps": Tolerance(0.1, 0.2)}})
    assert nested.get("training_resume", "mps") == Tolerance(0.1, 0.2)
    assert nested.get("training_resume", "cpu") == Tolerance(1e-5, 1e-6)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {"resume": {}},
            ValueError,
            "there is no tolerance named 'resume'; the names are grad_accumulation, training_resume",
        ),
        ({"training_resume": 1e-3}, TypeError, "tolerance 'training_resume' must be a Tolerance or a dict, got float"),
        (
            {"training_resume": {"tol": 1}},
            ValueError,
            "tolerance 'training_resume': 'tol' is not rtol, atol or a device type",
        ),
        (
            {"training_resume": {"rtol": "1e-3"}},
            TypeError,
            "tolerance 'training_resume': rtol must be a number, got str '1e-3'",
        ),
        (
            {"training_resume": {"cuda": {"atol": -1}}},
            ValueError,
            "tolerance 'training_resume' on 'cuda': atol must be finite and >= 0, got -1",
        ),
        (
            {"training_resume": {"cuda": {"cpu": {}}}},
            ValueError,
            "tolerance 'training_resume' on 'cuda': 'cpu' is not rtol or atol",
        ),
        (
            {"training_resume": {"cuda": 3}},
            TypeError,
            "tolerance 'training_resume' on 'cuda' must be a Tolerance or a dict, got int",
        ),
    ],
)
def test_bad_overrides_are_refused(overrides, error, message):
    """The error names the tolerance, the key and what is allowed."""
    with pytest.raises(error) as caught:
        Tolerances(overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "x"}, "there is no tolerance named 'x'; the names are grad_accumulation, training_resume"),
        (
            {"name": "training_resume", "rtol": float("nan")},
            "tolerance 'training_resume': rtol must be finite and >= 0, got nan",
        ),
        (
            {"name": "training_resume", "device": "gpu"},
            "tolerance 'training_resume': 'gpu' is not a device",
        ),
    ],
)
def test_bad_calls_are_refused(call, message):
    """An unknown name or device and a number that is none are errors."""
    with pytest.raises(ValueError) as caught:
        Tolerances().get(**call)
    assert str(caught.value) == message
