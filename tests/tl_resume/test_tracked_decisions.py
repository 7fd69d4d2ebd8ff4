"""Tracked values note decisions: whose value decided, at which line of the person's code, and modulo what."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tl_resume._check._tracked import Decision, Decisions, TrackedTensors, track


def noted(function: Callable[..., Any], *values: Any) -> list[tuple[str, int, int | None]]:
    """Call a function with tracked values; return the label, line of the function and modulus of each decision."""
    decisions = Decisions()
    with TrackedTensors(decisions) as tensors:
        given_: list[Any] = []
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                tensors.watch(value, f"v{index}")
                given_.append(value)
            else:
                given_.append(track(value, decisions, frozenset([f"v{index}"])))
        function(*given_)
    assert {decision.code for decision in decisions.seen} <= {function.__code__}
    first = function.__code__.co_firstlineno
    return sorted(((d.label, d.line - first, d.modulus) for d in decisions.seen), key=str)


def by_arithmetic(v: Any) -> None:
    a = v + 1
    b = 2 * a - v
    str(b)
    f"{b:.2f}"
    [0] * 3
    torch.ones(2) * v


def by_comparison(v: Any) -> bool:
    a = 2 * v
    return a > 3


def by_reflected_comparison(v: Any) -> bool:
    a = 1.5

    return a < v


def by_truth(v: Any) -> None:
    if v:
        pass


def by_cycle(v: Any) -> bool:
    return v % 4 == 3


def by_shifted_cycle(v: Any) -> bool:
    return (v + 1) % 4 == 0


def by_cycle_and_more(v: Any) -> bool:
    return (v % 4) * 2 > 3


def by_rounding(v: Any) -> None:
    a = v / 100

    int(a)


def by_whole_part(v: Any) -> None:
    v // 100


def by_key(v: Any) -> int:
    return {"a": 1}[v]


def by_choice(v: Any) -> float:
    return max(v, 0.5)


def by_two(v: Any, w: Any) -> bool:
    gap = v - w
    return gap > 1


def by_tensor_on_the_left(v: Any) -> None:
    loss = torch.tensor(0.5)
    if loss < v:
        pass


def by_numpy_on_the_left(v: Any) -> None:
    if np.float32(0.5) < v:
        pass


def by_tensor(v: Any) -> None:
    a = v * 2
    if a > 1:
        pass


def by_item_of_tensor(v: Any) -> bool:
    a = v.item()
    return a > 1


def by_several_elements(v: Any) -> None:
    a = v.expand(3) > 1
    a.sum()


NOTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[str, int, int | None]]]] = {
    "arithmetic and text": (by_arithmetic, (2,), []),
    "comparison": (by_comparison, (2,), [("v0", 2, None)]),
    "comparison of a string": (lambda v: v == "warmup", ("warmup",), [("v0", 0, None)]),
    "comparison with None": (lambda v: v == None, (2,), [("v0", 0, None)]),  # noqa: E711
    "is None": (lambda v: v is None, (2,), []),
    "reflected comparison": (by_reflected_comparison, (2.0,), [("v0", 3, None)]),
    "truth of a number": (by_truth, (2,), [("v0", 1, None)]),
    "truth of a flag": (by_truth, (False,), [("v0", 1, None)]),
    "truth of a string": (by_truth, ("",), [("v0", 1, None)]),
    "cycle": (by_cycle, (7,), [("v0", 1, 4)]),
    "shifted cycle": (by_shifted_cycle, (7,), [("v0", 1, 4)]),
    "cycle that is no more one": (by_cycle_and_more, (7,), [("v0", 1, None)]),
    "rounding": (by_rounding, (250,), [("v0", 3, None)]),
    "whole part": (by_whole_part, (250,), [("v0", 1, None)]),
    "key": (by_key, ("a",), [("v0", 1, None)]),
    "choice": (by_choice, (0.25,), [("v0", 1, None)]),
    "two values": (by_two, (3, 1), [("v0", 2, None), ("v1", 2, None)]),
    "tensor on the left": (by_tensor_on_the_left, (2.0,), [("v0", 2, None)]),
    "numpy on the left": (by_numpy_on_the_left, (2.0,), [("v0", 1, None)]),
    "tensor": (by_tensor, (torch.tensor(3.0),), [("v0", 2, None)]),
    "item of a tensor": (by_item_of_tensor, (torch.tensor(3.0),), [("v0", 2, None)]),
    "tensor of several elements": (by_several_elements, (torch.tensor(3.0),), []),
}


@pytest.mark.parametrize("name", NOTED)
def test_decisions_are_noted_where_they_are_made(name: str) -> None:
    """Whose value decided, at which line, and modulo what; arithmetic and text are no decisions."""
    function, values, expected = NOTED[name]
    assert noted(function, *values) == expected


def test_a_tensor_on_the_left_needs_no_mode() -> None:
    """``loss < best`` is noted also where no tensor is watched; a mask of several elements is not."""
    decisions = Decisions()
    best = track(2.0, decisions, frozenset(["best"]))
    assert (torch.ones(2) < best).all()
    assert decisions.seen == set()
    assert torch.tensor(0.5) < best
    assert [decision.label for decision in decisions.seen] == ["best"]


def test_a_library_that_compares_is_not_noted() -> None:
    """What the standard library, torch and numpy do with a value is not the loop's decision."""
    decisions = Decisions()
    value = track(3, decisions, frozenset(["x"]))
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=value)  # compares it with 0
    nn.Dropout(track(0.5, decisions, frozenset(["p"])))
    copy.deepcopy({"v": value})
    json.dumps([value])
    torch.testing.assert_close(torch.ones(1), torch.ones(1), rtol=track(0.1, decisions, frozenset(["r"])), atol=0.0)
    assert decisions.seen == set()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python tells columns from 3.11 on")
def test_the_column_tells_two_decisions_of_a_line_apart() -> None:
    """Two comparisons of one line are two decisions, each with its column."""
    decisions = Decisions()
    value = track(3, decisions, frozenset(["x"]))
    assert (value > 1, value > 2) == (True, True)
    assert len({decision.column for decision in decisions.seen}) == 2


def test_a_decision_is_noted_once() -> None:
    """The same comparison in each turn of a loop is one decision."""
    decisions = Decisions()
    value = track(3, decisions, frozenset(["x"]))
    for turn in range(5):
        assert (value > turn) is (turn < 3)
    assert len(decisions.seen) == 1
    (decision,) = decisions.seen
    assert isinstance(decision, Decision)
    assert decision.code.co_name == "test_a_decision_is_noted_once"
