"""Any nesting of plain containers is put back as it was, whatever happened to it since."""

from __future__ import annotations

import copy
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_outside, capture_state, compare_captures, put_back

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text("ab", max_size=2), st.binary(max_size=2)
)
KEYS = st.one_of(st.none(), st.integers(-3, 3), st.text("ab", max_size=2), st.tuples(st.integers(0, 1), st.booleans()))
TENSORS = st.lists(st.integers(-3, 3), max_size=3).map(torch.tensor)
VALUES = st.recursive(
    st.one_of(SCALARS, TENSORS, st.sets(KEYS, max_size=3), st.lists(SCALARS, min_size=9, max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)
PLACE = Piece("outside", "x")


def same(a, b):
    """Compare strictly: types, order of keys, NaN equal to NaN, signs of zeros."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def scramble(value, other, data):
    """Change a value in place, somewhere."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, set):
        value.symmetric_difference_update({1, "a"})
    elif isinstance(value, list):
        act = data.draw(st.sampled_from(["append", "clear", "reverse", "replace", "into"]))
        if act == "append":
            value.append(other)
        elif act == "clear":
            value.clear()
        elif act == "reverse":
            value.reverse()
        elif value and act == "replace":
            value[0] = other
        elif value:
            scramble(value[-1], other, data)
    elif isinstance(value, tuple) and value:
        scramble(value[data.draw(st.integers(0, len(value) - 1))], other, data)
    elif isinstance(value, dict):
        key = data.draw(st.sampled_from([*value, "new"]))
        if key in value and data.draw(st.booleans()):
            scramble(value[key], other, data)
        elif key in value and data.draw(st.booleans()):
            del value[key]
        else:
            value[key] = other


@settings(max_examples=120, deadline=None)
@given(VALUES, VALUES, st.data())
def test_whatever_is_mutated_comes_back(value, other, data):
    """Values that were mutated, or replaced, are put back exactly, in the same object where it can be changed."""
    before = copy.deepcopy(value)
    capture = capture_outside({"x": value})
    holder = [value]
    for _ in range(3):
        scramble(value, copy.deepcopy(other), data)
    put_back(capture, None, [PLACE], outside={"x": (lambda: holder[0], lambda new: holder.__setitem__(0, new))})
    assert same(holder[0], before)
    assert compare_captures(capture, capture_outside({"x": holder[0]})) == []
    if isinstance(value, (list, dict, set, torch.Tensor)):
        assert holder[0] is value


@settings(max_examples=80, deadline=None)
@given(VALUES, VALUES)
def test_whatever_is_there_gives_way(value, other):
    """In another setup, with anything in its place, the value stands exactly, and shares nothing with the capture."""
    model = nn.Linear(1, 1)
    setups = [TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    before = copy.deepcopy(value)
    setups[0].held, setups[1].held = value, other
    capture = capture_state(setups[0])
    for _ in range(2):
        put_back(capture, setups[1], [Piece("attribute", "held")])
        assert same(setups[1].held, before)
        if isinstance(setups[1].held, torch.Tensor):
            setups[1].held.fill_(7)
        setups[1].held = None
    assert same(value, before)


@settings(max_examples=80, deadline=None)
@given(VALUES, VALUES)
def test_a_comparison_is_empty_for_equal_values_only(a, b):
    """A value differs from another one as a strict comparison has it, but for signs of zeros and orders of keys."""
    first, second = capture_outside({"x": a}), capture_outside({"x": b})
    assert compare_captures(first, capture_outside({"x": copy.deepcopy(a)})) == []
    if compare_captures(first, second):
        assert not same(a, b)
    assert bool(compare_captures(first, second)) == bool(compare_captures(second, first))
