"""What moved between two moments, told from norms."""

from __future__ import annotations

import math

import pytest
import torch

from tl_telemetry._fingerprints import Fingerprint


def fingerprints(before: float, after: float, *, other_device: bool) -> tuple[Fingerprint, Fingerprint]:
    """The fingerprints of one number at two moments, the later one as if it had been read on another device."""
    first, second = (Fingerprint({"weight": torch.tensor([value])}) for value in (before, after))
    if other_device:
        second._devices["weight"] = torch.device("cuda")
    return first, second


@pytest.mark.parametrize(
    ("after", "other_device", "moved"),
    [
        (3.0, False, False),
        (3.000001, False, True),
        (3.000001, True, False),  # the rounding of another order of additions
        (3.001, True, True),
        (math.nan, True, True),
    ],
)
def test_the_same_values_on_another_device_have_not_moved(after, other_device, moved):
    """On one device every change of a norm counts, across devices one beyond rounding."""
    first, second = fingerprints(3.0, after, other_device=other_device)
    assert second.moved_since(first) == ({"weight"} if moved else set())


def test_what_is_not_a_number_at_both_moments_has_not_moved():
    """NaN is no change of NaN."""
    first, second = fingerprints(math.nan, math.nan, other_device=False)
    assert second.moved_since(first) == set()
