"""Gradients as vectors: sums, lengths, and what one is made of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tl_accum._vectors import (
    Vector,
    added,
    agrees,
    dot,
    is_finite,
    largest,
    made_of,
    minus,
    norm,
    num_elements,
    only,
    ratio,
)


def vector(seed: int, dtype: torch.dtype = torch.float32) -> Vector:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator, dtype=dtype),
        "bias": torch.randn(4, generator=generator, dtype=dtype),
    }


def times(a: Vector, factor: float) -> Vector:
    return {name: value * factor for name, value in a.items()}


factors = st.floats(0.01, 100.0).flatmap(lambda size: st.sampled_from([size, -size]))


def test_a_parameter_that_is_missing_is_zero() -> None:
    """In sums and differences; of a product only what both have counts."""
    a, b = {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 1.0]), "y": torch.tensor([3.0])}
    assert {name: value.tolist() for name, value in added([a, b], [2.0, 1.0]).items()} == {"x": [3.0, 5.0], "y": [3.0]}
    assert {name: value.tolist() for name, value in minus(a, b).items()} == {"x": [0.0, 1.0], "y": [-3.0]}
    assert dot(a, b) == 3.0
    assert norm(b) == math.sqrt(11.0)


def test_nothing_is_zero() -> None:
    """No vector, or one without elements, has length 0 and agrees with itself only."""
    empty = {"x": torch.zeros(0)}
    assert (added([]), norm({}), largest({}), largest(empty), num_elements(empty), is_finite({})) == (
        {},
        0,
        0,
        0,
        0,
        True,
    )
    assert agrees({}, empty, 0.1)
    assert not agrees(vector(0), {}, 0.1)
    assert ratio(vector(0), {}, 0.1) is None
    assert made_of(vector(0), [], 0.1) is None


def test_sums_are_in_double_precision() -> None:
    """A thousand times 1e-8 is not lost beside 1."""
    one, small = {"x": torch.tensor([1.0])}, {"x": torch.tensor([1e-8])}
    total = added([one, *[small] * 1000])
    assert total["x"].dtype is torch.float64
    assert float(total["x"]) == pytest.approx(1.00001, rel=1e-9)


def test_complex_numbers_are_taken_as_pairs() -> None:
    """Inner product and length are those of real and imaginary parts."""
    a = {"x": torch.tensor([3.0 + 4.0j])}
    assert norm(a) == pytest.approx(5.0)
    assert dot(a, {"x": torch.tensor([3.0 - 4.0j])}) == pytest.approx(-7.0)
    assert ratio(times(a, 4.0), a, 1e-6) == pytest.approx(4.0)
    assert largest(a) == pytest.approx(5.0)


def test_conjugate_views_are_resolved() -> None:
    """A lazy conjugate is no obstacle."""
    x = torch.tensor([3.0 + 4.0j])
    assert dot({"x": x.conj()}, {"x": x}) == pytest.approx(-7.0)


def test_only_some_parameters_are_kept() -> None:
    """By name, those that are there."""
    assert list(only(vector(0), ["bias", "other"])) == ["bias"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_seen(value: float) -> None:
    """In any of the parameters."""
    assert is_finite(vector(0))
    assert not is_finite({**vector(0), "more": torch.tensor([value])})


@given(factors)
def test_the_factor_of_a_multiple_is_found(factor: float) -> None:
    """Whatever its size and sign."""
    a = vector(1)
    assert ratio(times(a, factor), a, 1e-3) == pytest.approx(factor, rel=1e-5)
    assert ratio(added([times(a, factor), vector(2)], [1.0, factor]), a, 1e-3) is None


@given(st.lists(factors, min_size=1, max_size=4))
def test_the_factors_of_a_sum_are_found(wanted: list[float]) -> None:
    """Of vectors that are not alike; whatever their lengths."""
    parts = [times(vector(seed), 10.0**seed) for seed in range(len(wanted))]
    scaled = [times(part, 1 / norm(part)) for part in parts]
    target = added(scaled, wanted)
    found = made_of(target, scaled, 1e-3)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3 * max(map(abs, wanted)))


def test_what_is_no_sum_is_none() -> None:
    """A rest beyond tolerance."""
    parts = [vector(1), vector(2)]
    assert made_of(added([*parts, vector(3)]), parts, 1e-3) is None


@pytest.mark.parametrize(
    "parts",
    [
        [{"x": torch.ones(4)}, {"x": torch.arange(4.0)}],
        [vector(1), times(vector(1), 2.0)],
        [vector(1), times(vector(1), 0.0)],
    ],
    ids=["too few elements", "alike", "one is 0"],
)
def test_parts_that_do_not_tell_are_not_judged(parts: list[Vector]) -> None:
    """With them any factors would fit, or several."""
    assert made_of(added(parts, [2.0, 3.0]), parts, 1e-3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_every_precision_is_taken(dtype: torch.dtype) -> None:
    """Gradients come in any dtype."""
    a: dict[str, Tensor] = vector(4, dtype)
    assert agrees(a, {name: value.clone() for name, value in a.items()}, 1e-6)
    assert ratio(times(a, 2.0), a, 1e-2) == pytest.approx(2.0, rel=1e-2)
    assert num_elements(a) == 16
