"""Iterators in a capture: where they stand, copies that go on from there, and the data that these share."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_state, compare_captures, put_back

HELD = Piece("attribute", "held")

DATA = [torch.tensor([float(index)]) for index in range(6)]

ITERATORS = {
    "list": lambda: iter(DATA),
    "tuple": lambda: iter(tuple(DATA)),
    "reversed": lambda: reversed(DATA),
    "dict": lambda: iter(dict(enumerate(DATA))),
    "values": lambda: iter(dict(enumerate(DATA)).values()),
    "items": lambda: iter(dict(enumerate(DATA)).items()),
    "set": lambda: iter(set(range(6))),
    "range": lambda: iter(range(6)),
    "huge range": lambda: iter(range(1 << 70)),
    "string": lambda: iter("abcdef"),
    "zip": lambda: zip(DATA, range(6), strict=False),
    "zip of a dict": lambda: zip(dict(enumerate(DATA)).items(), range(6), strict=False),
    "enumerate": lambda: enumerate(DATA),
    "map": lambda: map(float, DATA),
    "filter": lambda: filter(torch.is_tensor, DATA),
    "cycle": lambda: itertools.cycle(DATA[:3]),
    "chain": lambda: itertools.chain(DATA[:3], DATA[3:]),
    "chain of iterators": lambda: itertools.chain(iter(DATA[:1]), map(torch.neg, DATA[1:])),
    "flat": lambda: itertools.chain.from_iterable([DATA[:1], DATA[1:]]),
    "islice": lambda: itertools.islice(DATA, 1, 6),
    "count": lambda: itertools.count(5),
    "repeat": lambda: itertools.repeat(torch.tensor(1.0), 6),
    "accumulate": lambda: itertools.accumulate(range(6)),
    "nested": lambda: enumerate(zip(itertools.cycle(DATA[:2]), itertools.islice(itertools.count(), 6), strict=False)),
}


def holding(value: object) -> TrainingSetup:
    model = nn.Linear(1, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    setup.held = value
    return setup


def take(iterator, count=3):
    return list(itertools.islice(iterator, count))


def same(a, b):
    """Compare tensors by identity, so that a copy of the data is noticed."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b if torch.is_tensor(a) and any(a is item for item in DATA) else bool(a == b)


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("drawn", [0, 2, 4])
def test_iterators_go_on_from_where_they_were(name, drawn):
    """A capture advances nothing; an iterator put back goes on at its place, over the same data, as often as wanted."""
    make = ITERATORS[name]
    reference = make()
    take(reference, drawn)
    expected = take(reference)
    iterator = make()
    take(iterator, drawn)
    setup = holding(iterator)
    capture = capture_state(setup)
    assert capture.uncopied == {}
    assert compare_captures(capture, capture_state(setup)) == []
    assert same(take(iterator), expected)
    fresh = holding(make())
    for target in (setup, fresh, fresh):
        put_back(capture, target, [HELD])
        assert [d for d in compare_captures(capture, capture_state(target)) if d.piece == HELD] == []
        assert same(take(target.held), expected)


@pytest.mark.parametrize("name", [name for name in ITERATORS if name != "repeat"])
def test_a_step_of_an_iterator_is_seen(name):
    """Two captures between which an iterator was advanced differ there."""
    setup = holding(ITERATORS[name]())
    before = capture_state(setup)
    next(setup.held)
    (difference,) = compare_captures(before, capture_state(setup))
    assert (difference.piece, difference.kind) == (HELD, "iterator")


@pytest.mark.parametrize("name", ["dict", "values", "items", "zip of a dict"])
def test_an_iterator_over_a_dict_stands_where_its_copy_does(name):
    """An iterator over a dict is put back as one over the list of what is left, and compared by what is left."""
    setup, fresh = holding(ITERATORS[name]()), holding(None)
    next(setup.held)
    put_back(capture_state(setup), fresh, [HELD])
    for _ in range(2):
        next(setup.held), next(fresh.held)
        found = compare_captures(capture_state(setup), capture_state(fresh))
        assert [difference for difference in found if difference.piece == HELD] == []


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: iter(DATA), "a list_iterator at item 2 of 6"),
        (lambda: iter(dict(enumerate(DATA))), "a dict_keyiterator at 4 items before its end"),
        (lambda: zip(DATA, range(9), strict=False), "a zip at item 2 of 6"),
        (lambda: itertools.chain([0], DATA), "a chain at item 1 of 6"),
        (lambda: itertools.count(5), "a count at 7"),
        (lambda: iter(DATA[:2]), "a list_iterator at item 2 of 2"),
    ],
)
def test_the_place_of_an_iterator_in_words(make, shown):
    """A difference says at which item of how many an iterator stands."""
    setup = holding(make())
    before = capture_state(setup)
    take(setup.held, 2)
    (difference,) = compare_captures(before, capture_state(setup))
    assert difference.shown_b == shown


def test_an_iterator_at_its_end():
    """An iterator that has given its last item is put back as one that gives none."""
    setup = holding(iter(DATA))
    list(setup.held)
    capture = capture_state(setup)
    fresh = holding(iter(DATA))
    (difference,) = [d for d in compare_captures(capture, capture_state(fresh)) if d.piece == HELD]
    assert difference.shown_a == "a list_iterator at its end"
    put_back(capture, fresh, [HELD])
    assert list(fresh.held) == []


def test_generators_cannot_be_copied():
    """A generator function's iterator, and what is built on one, is listed, neither advanced nor replaced."""

    def batches():
        yield from DATA

    setup = holding({"plain": batches(), "zip": zip(batches(), DATA, strict=True), "chain": itertools.chain(batches())})
    held = dict(setup.held)
    capture = capture_state(setup)
    assert capture.uncopied == {
        "setup.held['plain']": "generator",
        "setup.held['zip']": "zip",
        "setup.held['chain']": "chain",
    }
    put_back(capture, setup, [HELD])
    assert setup.held == held
    assert next(setup.held["plain"]) is DATA[0]
    fresh = holding(None)
    put_back(capture, fresh, [HELD])
    assert fresh.held == {}
    left = [d.shown_a for d in compare_captures(capture, capture_state(fresh)) if d.piece == HELD]
    assert left == ["a generator at an unknown place", "a zip at an unknown place", "a chain at an unknown place"]


@pytest.mark.parametrize("num_workers", [0])
def test_iterators_of_a_loader_cannot_be_copied(num_workers):
    """The iterator of a DataLoader is listed; its place is known and compared."""
    setup = holding(iter(DataLoader(DATA, num_workers=num_workers)))
    before = capture_state(setup)
    assert before.uncopied == {"setup.held": "_SingleProcessDataLoaderIter"}
    next(setup.held)
    (difference,) = [d for d in compare_captures(before, capture_state(setup)) if d.piece == HELD]
    assert (difference.shown_a, difference.shown_b) == (
        "a _SingleProcessDataLoaderIter at item 0",
        "a _SingleProcessDataLoaderIter at item 1",
    )


class Batches:
    """The person's own iterator: an object with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return DATA[self.position - 1]


def test_the_persons_own_iterators_are_objects():
    """An iterator class of the person's is captured by its attributes."""
    setup = holding(Batches())
    next(setup.held)
    capture = capture_state(setup)
    assert capture.uncopied == {}
    next(setup.held)
    (difference,) = compare_captures(capture, capture_state(setup))
    assert (difference.path, difference.shown_a, difference.shown_b) == (("position",), "1", "2")
    put_back(capture, setup, [HELD])
    assert next(setup.held) is DATA[1]
