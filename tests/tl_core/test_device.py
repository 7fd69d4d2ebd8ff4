from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tl_core import move_to_device

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Plain:
    x: torch.Tensor
    label: str = "a"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    twice: torch.Tensor = field(init=False, default=None)


class InPlace:
    """A batch whose `to` changes it, as graph libraries' batches do."""

    def __init__(self, x):
        self.store = {"x": x}

    def to(self, device):
        for name, value in self.store.items():
            self.store[name] = value.to(device)
        return self


class Silent(InPlace):
    def to(self, device):
        super().to(device)


class Uncopyable(InPlace):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")

    def to(self, device):
        moved = type(self)(self.store["x"].to(device))
        moved.origin = self
        return moved


def x():
    return torch.ones(2)


CONTAINERS = {
    "tensor": x,
    "list": lambda: [x(), "a", 3, None],
    "tuple": lambda: (x(), [x()]),
    "namedtuple": lambda: Pair(x(), x()),
    "dict": lambda: {"x": x(), "deep": {"y": [x()]}},
    "ordered dict": lambda: OrderedDict(x=x()),
    "default dict": lambda: defaultdict(list, x=x()),
    "user dict": lambda: UserDict(x=x()),
    "proxy": lambda: types.MappingProxyType({"x": x()}),
    "dataclass": lambda: Plain(x()),
    "frozen dataclass": lambda: Frozen(x()),
    "object": lambda: InPlace(x()),
    "object without result": lambda: Silent(x()),
    "object without deepcopy": lambda: Uncopyable(x()),
    "packed sequence": lambda: nn.utils.rnn.pack_sequence([x()]),
}


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, UserDict, types.MappingProxyType)):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return [value.data]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return [t for item in getattr(value, "__dict__", {}).values() for t in tensors(item)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_there_already_is_the_same_object(name):
    """A batch on the device is handed on untouched, containers included."""
    batch = CONTAINERS[name]()
    assert move_to_device(batch, "cpu") is batch


# The meta device is the other device that every machine has.
@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "object without deepcopy"])
def test_tensors_move_and_the_batch_is_not_modified(name):
    """All tensors are on the device, the type is kept where it can be, and the original has its own tensors."""
    batch = CONTAINERS[name]()
    before = tensors(batch)
    moved = move_to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert [t.device.type for t in tensors(moved)] == ["meta"] * len(before)
    assert all(now is then for now, then in zip(tensors(batch), before, strict=True))


def test_an_object_that_cannot_be_copied_deeply_is_moved_too():
    """Its own `to` is asked, on a shallow copy."""
    batch = Uncopyable(x())
    moved = move_to_device(batch, "meta")
    assert moved.store["x"].device.type == "meta"
    assert batch.store["x"].device.type == "cpu"


def test_other_things_are_passed_on():
    """Strings, numbers, modules and classes are not touched, nor are a batch's other entries lost."""
    module = nn.Linear(1, 1)
    moved = move_to_device({"x": x(), "name": "a", "module": module, "kind": nn.Linear}, "meta")
    assert (moved["name"], moved["module"], moved["kind"]) == ("a", module, nn.Linear)
    assert module.weight.device.type == "cpu"


def test_a_default_dict_keeps_its_default():
    """A rebuilt mapping is a copy of the old one, not only its entries."""
    assert move_to_device(defaultdict(list, x=x()), "meta")["new"] == []
