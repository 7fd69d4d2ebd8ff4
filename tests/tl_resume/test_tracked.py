"""Tracked values: whatever is done with them gives what the plain value gives."""

from __future__ import annotations

import copy
import io
import json
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tl_resume._check._tracked import Decisions, track

VALUES = [0, 1, 7, -3, True, False, 2.5, -0.0, float("inf"), "ab", ""]
OTHERS = [
    *(2, 0, -1, True, False, 2.5, "b", None, [1, 2], (1,), 2j, float("nan")),
    *(np.float32(2), np.int64(3), np.array([1.0, 2.0]), np.array([1.0, 2.0], dtype=np.float32)),
    *(torch.tensor(2.0), torch.tensor([1, 2]), torch.tensor(True), torch.ones(2, dtype=torch.float16)),
]
OPERATIONS: list[Callable[[Any, Any], Any]] = [
    *(
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.pow,
        divmod,
    ),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
]
NUMBERS = [value for value in VALUES if not isinstance(value, str)]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "not": lambda v: not v,
    "int": int,
    "float": float,
    "str": str,
    "repr": repr,
    "format": lambda v: f"{v}",
    "format wide": lambda v: f"{v:>8}",
    "format fixed": lambda v: f"{v:.3f}",
    "percent": lambda v: "%s %r" % (v, v),  # noqa: UP031  the old way is what is tried
    "percent d": lambda v: "%d" % v,  # noqa: UP031
    "round": round,
    "round to digits": lambda v: round(v, 1),
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "negated": operator.neg,
    "positive": operator.pos,
    "abs": abs,
    "inverted": operator.invert,
    "hash": hash,
    "key": lambda v: {v: "found"}[v],
    "found by a key": lambda v: {1: "one", 2.5: "half", "ab": "text"}.get(v),
    "in a tuple": lambda v: v in (1, 2.5, "ab"),
    "in a set": lambda v: v in {1, 2.5, "ab"},
    "index": operator.index,
    "item of a list": lambda v: list(range(10, 20))[v],
    "slice": lambda v: list(range(10))[:v],
    "range": lambda v: list(range(v)),
    "repeated list": lambda v: [0] * v,
    "length": len,
    "sqrt": math.sqrt,
    "isfinite": math.isfinite,
    "min": lambda v: min(v, 3),
    "max": lambda v: max(3, v),
    "sum": lambda v: sum([v, v]),
    "sorted": lambda v: sorted([v, v]),
    "pow of three": lambda v: pow(v, 2, 3),
    "bit length": lambda v: v.bit_length(),
    "is whole": lambda v: v.is_integer(),
    "upper": lambda v: v.upper(),
    "joined": lambda v: "-".join([v, "c"]),
    "is int": lambda v: isinstance(v, int),
    "is bool": lambda v: isinstance(v, bool),
    "is float": lambda v: isinstance(v, float),
    "is str": lambda v: isinstance(v, str),
    "clamped": lambda v: torch.ones(2).clamp(max=v),
    "tensor scaled": lambda v: torch.ones(2, dtype=torch.float16).mul(v),
    "tensor compared": lambda v: torch.ones(2) < v,
    "zeros": lambda v: torch.zeros((v, 2)),
    "viewed": lambda v: torch.ones(7).view(v, -1),
    "expanded": lambda v: torch.ones(1).expand([v, -1]),
    "dropout": lambda v: nn.functional.dropout(torch.ones(2), v, training=False),
    "numpy function": lambda v: np.maximum(v, np.float32(1.0)),
    "numpy seed": lambda v: np.random.RandomState(v).rand(),
}


def tracked(value: Any, decisions: Decisions | None = None) -> Any:
    return track(value, decisions or Decisions(), frozenset(["x"]))


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Describe what a call gives in full: the names of the types of all parts, values bit by bit, or the exception."""
    try:
        return described(function(*arguments))
    except Exception as error:  # noqa: BLE001  whatever it raises is its outcome
        return type(error).__name__, ""


def described(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return "Tensor", value.dtype, str(value.tolist())
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype, str(value.tolist())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(described, value))
    return type(value).__name__, repr(value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy divides by zero
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_two_operands_give_what_plain_ones_give(value: Any, operation: Callable[[Any, Any], Any]) -> None:
    """On either side of a number, string, array or tensor: the same value, type and dtype, or the same exception."""
    for other in OTHERS:
        assert outcome(operation, tracked(value), other) == outcome(operation, value, other), other
        if isinstance(value, bool) and isinstance(other, bool) and operation.__name__ in ("and_", "or_", "xor"):
            continue  # bool comes first, and takes what is derived from int for an int: the value is the same
        assert outcome(operation, other, tracked(value)) == outcome(operation, other, value), other


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_two_tracked_operands_give_what_plain_ones_give(operation: Callable[[Any, Any], Any]) -> None:
    """Two tracked values of any kinds: the same value and type, or the same exception."""
    for one in VALUES:
        for other in VALUES:
            found = outcome(operation, tracked(one), tracked(other))
            assert found == outcome(operation, one, other), (one, other)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(value, name, id=f"{value!r}-{name}")
        for value in VALUES
        for name in FUNCTIONS
        # numpy's seed asks for the very type bool
        if not (isinstance(value, bool) and name == "numpy seed")
    ],
)
def test_one_operand_gives_what_a_plain_one_gives(value: Any, name: str) -> None:
    """Conversions, rounding, text, keys, indices, sizes, arguments of torch and numpy."""
    assert outcome(FUNCTIONS[name], tracked(value)) == outcome(FUNCTIONS[name], value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_and_files_hold_plain_values(value: Any) -> None:
    """pickle, torch.save, copy and deepcopy give a value of exactly the plain type, inside of containers too."""
    held = {"v": [tracked(value)]}
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    copies = (
        pickle.loads(pickle.dumps(held)),
        copy.deepcopy(held),
        torch.load(file, weights_only=False),
        {"v": [copy.copy(held["v"][0])]},
    )
    for found in copies:
        assert type(found["v"][0]) is type(value)
        assert repr(found) == repr({"v": [value]})


@pytest.mark.parametrize("value", [value for value in VALUES if not isinstance(value, bool)], ids=repr)
def test_json_holds_the_value(value: Any) -> None:
    """json writes numbers and strings as it writes plain ones."""
    assert json.dumps({"v": tracked(value)}) == json.dumps({"v": value})


def test_what_only_bool_itself_can_do() -> None:
    """Nothing can be derived from bool: ``is True``, json and the constructors of tensors see an int."""
    flag = tracked(True)
    assert flag is not True
    assert json.dumps(flag) == "1"
    assert torch.tensor(flag).dtype == torch.int64


def test_what_is_no_number_or_string_stays() -> None:
    """None, lists, bytes and objects are returned as they are."""
    for value in (None, [1], b"x", object()):
        assert tracked(value) is value


def test_numbers_of_numpy_are_followed() -> None:
    """A mean of numpy's is followed as Python's number of its value, also as what is computed from a tracked one."""
    decisions = Decisions()
    value = tracked(np.float64(2.5), decisions)
    assert (type(value).__name__, value) == ("float", 2.5)
    gap = tracked(1.0, decisions) - np.mean([0.5])
    decisions.seen.clear()
    assert gap > 0.25
    assert len(decisions.seen) == 1


# -- random expressions ------------------------------------------------------------------------------------------

LEAVES = st.sampled_from(["x", "y", "2", "3", "0.5", "-1"])
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(lambda p: f"({' '.join(p)})"),
        st.tuples(inner, st.sampled_from(["<", "<=", "==", "!="]), inner).map(lambda p: f"({' '.join(p)})"),
        st.tuples(st.sampled_from(["-", "not ", "abs", "round", "float", "bool"]), inner).map(
            lambda p: f"({p[0]}({p[1]}))"
        ),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        inner.map(lambda e: f"({e}) ** 2"),
    ),
    max_leaves=8,
)
SCALARS = st.one_of(st.integers(-5, 100), st.floats(-10, 10), st.booleans())


@settings(max_examples=300, deadline=None)
@given(expression=EXPRESSIONS, x=SCALARS, y=SCALARS)
def test_random_expressions_give_what_plain_values_give(expression: str, x: Any, y: Any) -> None:
    """Nested arithmetic, comparisons, conditions and choices: the same value and kind, or the same exception."""
    code = compile(expression, "<expression>", "eval")
    expected = outcome(lambda: eval(code, {"x": x, "y": y}))
    assert outcome(lambda: eval(code, {"x": tracked(x), "y": tracked(y)})) == expected
