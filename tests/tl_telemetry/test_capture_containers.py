"""What a capture holds of containers and objects: it sees a change, and puts them back, here and in a fresh setup."""

from __future__ import annotations

import argparse
import collections
import types
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_state, compare_captures, put_back

HELD = Piece("attribute", "held")


def holding(value: object) -> TrainingSetup:
    model = nn.Linear(1, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    setup.held = value
    return setup


def round_trip(make, change):
    """Capture, change, put back; do the same with a fresh setup; return what both hold then."""
    setup = holding(make())
    capture = capture_state(setup)
    assert compare_captures(capture, capture_state(setup)) == []
    change(setup)
    assert {difference.piece for difference in compare_captures(capture, capture_state(setup))} == {HELD}
    fresh = holding(make())
    change(fresh)
    for target in (setup, fresh):
        put_back(capture, target, [HELD])
        assert [d for d in compare_captures(capture, capture_state(target)) if d.piece == HELD] == []
    return setup.held, fresh.held


Point = collections.namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Limits:
    low: float
    seen: list[int] = field(default_factory=list)


class Slots:
    __slots__ = ("__hidden", "count", "unset")

    def __init__(self) -> None:
        self.count, self.__hidden = 1, [1]

    def hidden(self) -> list[int]:
        return self.__hidden


class Derived(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.extra = 2


class Guarded:
    """Lets nobody set attributes, has a property that raises, and answers any question for attributes with an error."""

    def __init__(self) -> None:
        self.__dict__["count"] = 1
        self.__dict__["total"] = 5

    @property
    def total(self) -> int:
        raise RuntimeError("not ready")

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("read only")


def changed(setup, **attributes):
    for name, value in attributes.items():
        object.__setattr__(setup.held, name, value)


CONTAINERS = {
    "list": (lambda: [1, [2, 3]], lambda s: s.held[1].append(4), lambda v: v == [1, [2, 3]]),
    "dict": (lambda: {"a": 1, None: 2}, lambda s: s.held.update(a=2, b=3), lambda v: v == {"a": 1, None: 2}),
    "dict order": (
        lambda: {"a": [1], "b": [2]},
        lambda s: s.held.update(a=[0], c=s.held.pop("a")),
        lambda v: list(v.items()) == [("a", [1]), ("b", [2])],
    ),
    "set": (lambda: {1, None, "a"}, lambda s: s.held.discard(1), lambda v: v == {1, None, "a"}),
    "frozenset": (
        lambda: frozenset({1, (2, 3)}),
        lambda s: setattr(s, "held", frozenset()),
        lambda v: v == frozenset({1, (2, 3)}),
    ),
    "namedtuple": (
        lambda: Point(1, [2]),
        lambda s: s.held.y.append(3),
        lambda v: v == Point(1, [2]) and type(v) is Point,
    ),
    "torch's tuple": (
        lambda: torch.ones(2, 2).max(0),
        lambda s: s.held.values.zero_(),
        lambda v: v.values.tolist() == [1.0, 1.0] and type(v) is type(torch.ones(2, 2).max(0)),
    ),
    "deque": (
        lambda: collections.deque([1, 2], maxlen=2),
        lambda s: s.held.append(3),
        lambda v: v == collections.deque([1, 2]) and v.maxlen == 2,
    ),
    "long deque": (
        lambda: collections.deque(range(20), maxlen=20),
        lambda s: s.held.append(3),
        lambda v: list(v) == list(range(20)) and v.maxlen == 20,
    ),
    "defaultdict": (
        lambda: collections.defaultdict(list, a=[1]),
        lambda s: s.held["a"].append(2),
        lambda v: v == {"a": [1]} and v["new"] == [],
    ),
    "Counter": (
        lambda: collections.Counter("aab"),
        lambda s: s.held.update("b"),
        lambda v: v == collections.Counter("aab") and v["z"] == 0,
    ),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda s: s.held.update(a=3),
        lambda v: v == collections.OrderedDict(a=1, b=2),
    ),
    "object": (
        lambda: types.SimpleNamespace(a=1, b=[2]),
        lambda s: (s.held.b.clear(), setattr(s.held, "c", 1)),
        lambda v: vars(v) == {"a": 1, "b": [2]},
    ),
    "Namespace": (
        lambda: argparse.Namespace(lr=0.1),
        lambda s: setattr(s.held, "lr", 0.2),
        lambda v: v == argparse.Namespace(lr=0.1),
    ),
    "frozen dataclass": (
        lambda: Limits(0.5, [1]),
        lambda s: changed(s, low=0.75, seen=[]),
        lambda v: v == Limits(0.5, [1]),
    ),
    "slots": (
        Slots,
        lambda s: (s.held.hidden().append(2), changed(s, unset=1)),
        lambda v: (v.count, v.hidden(), hasattr(v, "unset")) == (1, [1], False),
    ),
    "slots and more": (
        Derived,
        lambda s: changed(s, extra=3, count=2),
        lambda v: (v.count, v.extra) == (1, 2),
    ),
    "guarded": (
        Guarded,
        lambda s: vars(s.held).update(count=2, total=6),
        lambda v: vars(v) == {"count": 1, "total": 5},
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_and_objects(name):
    """Containers and objects are put back in place where they can be changed, with their type and what it needs."""
    make, change, right = CONTAINERS[name]
    assert all(right(value) for value in round_trip(make, change))


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("other", [None, "a string", 3.5, [], {}, torch.ones(1)], ids=str)
def test_containers_and_objects_are_built_where_they_are_missing(name, other):
    """Where there is None or a thing of another type, a new one of the right type is built."""
    make, _, right = CONTAINERS[name]
    capture = capture_state(holding(make()))
    fresh = holding(other)
    put_back(capture, fresh, [HELD])
    assert right(fresh.held)


class MyError(Exception):
    """An exception that a loop keeps."""


def test_an_exception_of_the_person_is_built():
    """Objects of a class below a type of C's are built without a call of their __init__."""
    error = MyError("once")
    error.step = 3
    fresh = holding(None)
    put_back(capture_state(holding(error)), fresh, [HELD])
    assert (type(fresh.held), fresh.held.step) == (MyError, 3)


class Demanding(list):
    def __init__(self, size: int) -> None:
        super().__init__(range(size))


def test_a_list_of_a_class_that_needs_arguments_becomes_a_plain_one():
    """What cannot be made empty is built as a plain list or dict; where it is there, it is filled in place."""
    capture = capture_state(holding(Demanding(2)))
    there, missing = holding(Demanding(5)), holding(None)
    for setup in (there, missing):
        put_back(capture, setup, [HELD])
        assert setup.held == [0, 1]
    assert (type(there.held), type(missing.held)) == (Demanding, list)


def test_long_and_deep_structures():
    """A hundred thousand numbers are one node; below sixty levels a structure is not looked into."""
    chain = None
    for index in range(1000):
        chain = [index, chain]
    setup = holding({"numbers": list(range(100_000)), "chain": chain})
    capture = capture_state(setup)
    assert len(capture.nodes) < 200
    setup.held["numbers"][99_999] = -1
    (difference,) = compare_captures(capture, capture_state(setup))
    assert difference.path == ("numbers",)
    assert difference.shown_a == "a list of 100000 items"
    put_back(capture, setup, [HELD])
    assert setup.held["numbers"] == list(range(100_000))
    level = setup.held["chain"]
    for _ in range(999):
        level = level[1]
    assert level == [0, None]


def test_functions_locks_and_files_are_not_looked_into(tmp_path):
    """Two functions or files count as equal; those that are there stay, and only a function without cells is copied."""
    with (tmp_path / "log.txt").open("w") as file:
        setup = holding({"file": file, "call": len, "sum": sum, "type": int, "here": lambda: file})
        capture = capture_state(setup)
        file.write("something")
        assert compare_captures(capture, capture_state(setup)) == []
        assert capture.uncopied == {}
        there = {"file": None, "call": max, "here": 3}
        fresh = holding(there)
        put_back(capture, fresh, [HELD])
        assert fresh.held is there
        assert there == {"file": None, "call": max, "sum": sum, "type": int, "here": 3}


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.images, self.epoch = torch.ones(3), 0


def test_the_samples_of_a_dataset_are_no_state():
    """Of a dataset the counters are captured, and putting them back leaves its samples where they are."""
    setup = holding(Samples())
    capture = capture_state(setup)
    setup.held.epoch, setup.held.images = 1, torch.zeros(3)
    (difference,) = compare_captures(capture, capture_state(setup))
    assert difference.path == ("epoch",)
    put_back(capture, setup, [HELD])
    assert (setup.held.epoch, setup.held.images.tolist()) == (0, [0.0, 0.0, 0.0])
