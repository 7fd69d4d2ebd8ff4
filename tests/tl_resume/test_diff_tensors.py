from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tl_resume import diff_states
from tl_resume._diff import _stored

NAN, INF = math.nan, math.inf


def only(a, b, **tolerances):
    (difference,) = diff_states({"x": a}, {"x": b}, **tolerances).differences
    return difference


def test_equal_tensors_are_the_same():
    """Tensors of the same values are no difference, and are counted."""
    diff = diff_states({"x": torch.arange(6.0)}, {"x": torch.arange(6.0)})
    assert (diff.same, diff.differences, diff.num_tensors) == (True, (), 1)


def test_one_element_that_differs_is_found():
    """Count, size, place and both values of what differs."""
    a = torch.ones(3, 4)
    b = a.clone()
    b[2, 1] = 1.5
    found = only(a, b)
    assert (found.kind, found.num_elements, found.num_different) == ("value", 12, 1)
    assert (found.max_abs, found.index, found.values) == (0.5, (2, 1), (1.0, 1.5))
    assert found.max_rel == pytest.approx(1 / 3)
    assert str(found) == "x: 1 of 12 elements differ, by up to 0.5; [2, 1]: 1 -> 1.5"


def test_nan_equals_nan_at_the_same_place():
    """NaN on both sides is no difference, whatever its payload."""
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert payload.isnan().all()
    assert diff_states({"x": torch.tensor([NAN])}, {"x": payload}).same


def test_the_sign_of_zero_is_no_difference():
    """-0.0 equals 0.0, though their bytes differ."""
    assert diff_states({"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([-0.0, 1.0])}).same


def test_nan_on_one_side_is_counted_apart():
    """NaN is no largest difference; it is counted for each side."""
    found = only(torch.tensor([NAN, 1.0, 2.0, NAN]), torch.tensor([0.0, NAN, 2.5, NAN]))
    assert (found.num_different, found.nan_a, found.nan_b) == (3, 1, 1)
    assert (found.max_abs, found.index, found.max_rel) == (0.5, (2,), pytest.approx(0.2))


def test_only_nan_differs():
    """Where a difference is no number, there is no largest one."""
    found = only(torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0]))
    assert (found.max_abs, found.index, found.values, found.max_rel) == (None, None, None, None)
    assert str(found) == "x: 1 of 2 elements differ; NaN: 1 in a only"


def test_infinities():
    """Equal infinities are equal; against a number or each other they differ by infinity, at any tolerance."""
    assert diff_states({"x": torch.tensor([INF, -INF])}, {"x": torch.tensor([INF, -INF])}).same
    found = only(torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), rtol=1.0, atol=1e9)
    assert (found.num_different, found.max_abs, found.values) == (1, INF, (INF, -INF))
    assert only(torch.tensor([1.0]), torch.tensor([INF]), rtol=1.0).max_abs == INF


def test_the_relative_difference_leaves_out_zeros():
    """Relative to b, where b is not 0."""
    assert only(torch.tensor([1.0]), torch.tensor([0.0])).max_rel is None
    assert only(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])).max_rel == 0.5


def test_neighbours_among_large_integers_differ():
    """64-bit integers are compared as such: float64 rounds these to one number."""
    found = only(torch.tensor([2**62, 5]), torch.tensor([2**62 + 1, 5]))
    assert (found.num_different, found.max_abs, found.index) == (1, 1.0, (0,))
    assert found.values == (2**62, 2**62 + 1)


DTYPES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"""


@pytest.mark.parametrize("dtype", [name for name in DTYPES.split() if hasattr(torch, name)])
def test_every_dtype(dtype):
    """Tensors of every dtype are compared by value."""
    kind = getattr(torch, dtype)
    a = torch.ones(3, 2).to(kind)
    raw = a.clone().view(torch.uint8)
    raw[1, kind.itemsize] = 0 if kind.itemsize == 1 else raw[1, kind.itemsize] ^ 1
    b = raw.view(kind)
    assert diff_states({"x": a}, {"x": a.clone()}).same
    found = only(a, b)
    assert (found.num_different, found.index, found.a, found.b) == (1, (1, 1), None, None)


def test_dtypes_that_differ_are_a_difference_with_the_same_values():
    """Another dtype is a difference even where the values are equal, which is said."""
    found = only(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert (found.kind, found.a, found.b, found.num_different) == ("dtype", "float32", "bfloat16", 0)
    assert str(found) == "x: dtype float32 -> bfloat16"


def test_dtypes_that_differ_are_compared_by_value():
    """What rounding to another dtype did is measured."""
    found = only(torch.tensor([1.0, 1.001]), torch.tensor([1.0, 1.001]).half())
    assert (found.kind, found.num_different, found.index) == ("dtype", 1, (1,))
    assert str(found) == (
        "x: 1 of 2 elements differ, by up to 2.35e-05; dtype float32 -> float16; [1]: 1.001 -> 1.00098"
    )


def test_shapes_that_differ_are_not_compared():
    """Another shape is a difference of its own."""
    found = only(torch.zeros(3, 2), torch.zeros(2, 3))
    assert (found.kind, found.a, found.b, found.num_elements) == ("shape", (3, 2), (2, 3), 0)
    assert str(found) == "x: shape [3, 2] -> [2, 3]"


def test_within_the_tolerance_is_the_same_and_counted():
    """atol + rtol * |b|, as torch.allclose has it."""
    a, b = torch.tensor([1.0, 100.0, 0.0]), torch.tensor([1.05, 105.0, 0.05])
    diff = diff_states({"x": a}, {"x": b}, rtol=0.05, atol=0.05)
    assert (diff.same, diff.num_within_tolerance) == (True, 1)
    assert only(a, b, rtol=0.05).num_different == 1
    assert only(a, b, atol=0.06).index == (1,)


def test_figures_are_of_what_is_beyond_the_tolerance():
    """A difference within the tolerance does not count among the different elements."""
    found = only(torch.tensor([1.0, 2.0]), torch.tensor([1.1, 4.0]), atol=0.5)
    assert (found.num_different, found.max_abs) == (1, 2.0)


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(3, 0, dtype=torch.int64)])
def test_empty_tensors(empty):
    """Tensors without elements are the same."""
    assert diff_states({"x": empty}, {"x": empty.clone()}).same


def test_views_are_compared_by_their_elements():
    """Strides, conjugation and gradients do not matter."""
    a = torch.randn(4, 6)
    assert diff_states({"x": a.t()}, {"x": a.t().contiguous().requires_grad_()}).same
    c = torch.randn(3, dtype=torch.complex64)
    assert diff_states({"x": c.conj()}, {"x": c.conj().resolve_conj()}).same
    assert only(a.t(), a.t() + torch.eye(6, 4)).num_different == 4


def test_sparse_tensors_are_compared_by_their_parts():
    """Indices and values of a sparse tensor."""
    a = torch.eye(3).to_sparse()
    assert diff_states({"x": a}, {"x": a.clone()}).same
    (found,) = diff_states({"x": a}, {"x": (torch.eye(3) * 2).to_sparse()}).differences
    assert (found.path, found.max_abs) == ("x.values", 1.0)


_NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e30, NAN, INF, -INF, 1e-40])


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=40), st.sampled_from([0.0, 0.5]), st.booleans())
def test_chunks_do_not_show(
    pairs,
    rtol,
    from_file,
):
    """Compared in chunks of 16 bytes, tensors give the figures that one chunk gives."""
    a, b = (torch.tensor(side) for side in zip(*pairs, strict=True))
    whole = diff_states({"x": a}, {"x": b}, rtol=rtol)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stored, "CHUNK_BYTES", 16)
        chunked = diff_states({"x": a}, {"x": b}, rtol=rtol)
    assert chunked.as_dict() == whole.as_dict()
    reference = ~torch.isclose(a, b, rtol=rtol, atol=0.0, equal_nan=True)
    assert sum(item.num_different for item in whole.differences) == int(reference.sum())


def test_chunks_of_files_do_not_show(tmp_path, monkeypatch):
    """The same holds for tensors that lie in files, where a tail is shorter than a chunk."""
    torch.manual_seed(0)
    a = {"x": torch.randn(7, 5), "y": torch.arange(9), "z": torch.randn(3).half()}
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["x"][6, 4] += 1
    b["y"][8] += 3
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    whole = diff_states(a, b).as_dict()["differences"]
    assert len(whole) == 2
    for size in (16, 48, 1 << 20):
        monkeypatch.setattr(_stored, "CHUNK_BYTES", size)
        found = diff_states(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert sorted(found.as_dict()["differences"], key=lambda item: item["name"]) == whole
        assert diff_states(tmp_path / "a.safetensors", a).same
