"""What a file cannot represent is refused with its path, before anything is written."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from tl_resume._format import StateFile, write_state
from tl_resume._format import _header as header_module

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize_per_tensor")

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Data:
    x: int


class Colour(enum.IntEnum):
    RED = 1


class Labelled(torch.Tensor):
    pass


def function() -> None:
    pass


def _refusal(value: Any, tmp_path: Any) -> str:
    path = tmp_path / "state"
    with pytest.raises(TypeError) as caught:
        write_state(path, {"a": [0, value]})
    assert list(tmp_path.iterdir()) == []
    return str(caught.value)


_PLAIN = ", which cannot be saved without pickle: keep plain data, or give the object a state_dict()"
_REFUSED = {
    "function": (lambda: function, f"is a function{_PLAIN}"),
    "object": (lambda: Data(1), f"is a {__name__}.Data{_PLAIN}"),
    "enum": (lambda: Colour.RED, f"is a {__name__}.Colour{_PLAIN}"),
    "class": (lambda: int, f"is a type{_PLAIN}"),
    "named tuple": (
        lambda: Point(1, 2),
        f"is a {__name__}.Point, which cannot be saved without pickle, a named tuple, whose class a file cannot name: "
        "save tuple(value) or value._asdict()",
    ),
    "generator": (torch.Generator, f"is a torch._C.Generator{_PLAIN}"),
    "defaultdict": (
        lambda: defaultdict(Data),
        f"is a defaultdict of {Data!r}: factories that can be saved are "
        "bool, dict, float, int, list, set, str, tuple and None",
    ),
    "subclass": (
        lambda: torch.ones(2).as_subclass(Labelled),
        f"is a {__name__}.Labelled, a tensor subclass: save the plain tensors that it is made of",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "is a tensor on the meta device, which has no data"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
        "is a nested tensor: save the list value.unbind()",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "is a torch.nested._internal.nested_tensor.NestedTensor, a tensor subclass: "
        "save the plain tensors that it is made of",
    ),
    "lazy": (
        lambda: torch.nn.LazyLinear(2).weight,
        "is an uninitialised tensor of a lazy module: run a batch through the module first",
    ),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "is a tensor of layout _mkldnn: save value.to_dense()"),
    "bits": (
        lambda: torch.empty(2, dtype=torch.bits8),
        "is a tensor of dtype bits8, which safetensors cannot carry",
    ),
    "object array": (
        lambda: np.array([None]),
        "is a numpy array of dtype object: only numbers, bools, strings, bytes and dates can be saved",
    ),
    "structured array": (
        lambda: np.zeros(2, dtype=[("a", "<i4")]),
        "is a numpy array of dtype [('a', '<i4')]: only numbers, bools, strings, bytes and dates can be saved",
    ),
    "array subclass": (lambda: np.ma.array([1]), f"is a numpy.ma.MaskedArray{_PLAIN}"),
}


@pytest.mark.parametrize(("make", "message"), _REFUSED.values(), ids=_REFUSED)
def test_what_cannot_be_represented_is_refused_by_path(make, message, tmp_path):
    """The message names the place and the kind of the object; nothing has been written."""
    assert _refusal(make(), tmp_path) == f"state['a'][1] {message}"


def test_a_quantized_tensor_is_refused(tmp_path):
    """Its integers can be saved, its scale would be lost."""
    quantized = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    assert _refusal(quantized, tmp_path) == (
        "state['a'][1] is a quantized tensor: save value.int_repr() with its scale and zero point"
    )


def test_keys_are_plain(tmp_path):
    """A tensor or an object as a key is refused with the dict that has it."""
    tensor = torch.ones(1)
    assert _refusal({(1, tensor): 1}, tmp_path) == (
        "the key (1, tensor([1.])) of state['a'][1][1] is a tensor: keys are compared by value, tensors are not"
    )
    assert _refusal({function: 1}, tmp_path).startswith("the key <function function at 0x")


@pytest.mark.parametrize("kind", ["deep", "cyclic"])
def test_endless_nesting_is_refused(kind, tmp_path):
    """Deep nesting and a list that holds itself are errors of their own, not python's."""
    state: Any = []
    if kind == "cyclic":
        state.append(state)
    else:
        for _ in range(5000):
            state = [state]
    with pytest.raises(ValueError) as caught:
        write_state(tmp_path / "state", state)
    shown = f"state{'[0]' * 101}"[:200]
    assert str(caught.value) == (
        f"{shown}... is nested more than 100 deep, or a container that holds itself: "
        "training state is nested a few levels deep"
    )


def test_what_can_be_written_deeply_can_be_read(tmp_path):
    """The limits of writing and of reading are the same."""
    state: Any = 1
    for _ in range(100):
        state = {1: state}
    write_state(tmp_path / "state", state)
    with StateFile(tmp_path / "state") as file:
        assert file.state() == state


def test_a_header_that_safetensors_would_not_read_is_refused(monkeypatch, tmp_path):
    """The limit of 100 MB is checked before anything is written."""
    monkeypatch.setattr(header_module, "MAX_HEADER_BYTES", 1_500_000)
    with pytest.raises(ValueError) as caught:
        write_state(tmp_path / "state", {"history": list(range(300_000))})
    assert str(caught.value) == (
        "the names and the plain values of the state take 2 MB, more than the 100 MB that a safetensors header may "
        "have: keep long lists of numbers as tensors or arrays"
    )
    assert list(tmp_path.iterdir()) == []
