"""Objects of libraries in a capture: loaders, optimizers beside the setup's own, what cannot be made or looked into."""

from __future__ import annotations

import datetime

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_state, compare_captures, put_back

HELD = Piece("attribute", "held")


def make(value: object = None, model: nn.Module | None = None, **options: object) -> TrainingSetup:
    model = nn.Linear(2, 1) if model is None else model
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    setup.held = value
    return setup


class Box:
    """An object of the person's with any attributes."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class Sampler:
    """A sampler of the person's, in a library's loader."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self):
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_a_loader_is_looked_into_for_what_moves():
    """Of a DataLoader, its generator and the person's sampler are state, not its settings."""

    def build():
        return make(DataLoader(range(4), sampler=Sampler(), generator=torch.Generator().manual_seed(1)))

    setup = build()
    capture = capture_state(setup)
    setup.held.timeout = 3
    assert compare_captures(capture, capture_state(setup)) == []
    setup.held.sampler.epoch = 2
    torch.rand(1, generator=setup.held.generator)
    loader = setup.held
    assert len(compare_captures(capture, capture_state(setup))) == 2
    put_back(capture, setup, [HELD])
    assert compare_captures(capture, capture_state(setup)) == []
    assert setup.held is loader
    assert (loader.sampler.epoch, loader.timeout) == (0, 3)


class LoaderWithoutState(DataLoader):
    """A loader with the method and without a state, as accelerate's are unless a StatefulDataLoader is inside."""

    def state_dict(self) -> dict[str, object]:
        return self.dl_state_dict


def test_an_object_that_refuses_its_state_is_looked_into():
    """A state_dict() that raises is no state: what moves inside of the object is captured all the same."""
    setup = make(LoaderWithoutState(range(4), generator=torch.Generator().manual_seed(1)))
    capture = capture_state(setup)
    assert compare_captures(capture, capture_state(setup)) == []
    torch.rand(1, generator=setup.held.generator)
    assert len(compare_captures(capture, capture_state(setup))) == 1
    put_back(capture, setup, [HELD])
    assert compare_captures(capture, capture_state(setup)) == []


def test_an_optimizer_elsewhere():
    """An optimizer in an attribute is captured by its state_dict, and loaded."""

    def build():
        inner = nn.Linear(1, 1)
        return make(Box(model=inner, optimizer=torch.optim.Adam(inner.parameters(), lr=0.1)))

    def train(setup):
        setup.held.optimizer.zero_grad()
        setup.held.model(torch.ones(1, 1)).sum().backward()
        setup.held.optimizer.step()

    setup, fresh = build(), build()
    train(setup)
    capture = capture_state(setup)
    put_back(capture, fresh, capture.pieces)
    assert compare_captures(capture, capture_state(fresh)) == []
    train(fresh)
    train(setup)
    assert torch.equal(fresh.held.model.weight, setup.held.model.weight)


class Day(datetime.date):
    """An object that only its own class can make, with attributes."""


def test_an_object_that_cannot_be_made_is_left_out():
    """Where an object is missing whose class needs arguments, what is there stays; in place it is put back."""
    day = Day(2020, 1, 1)
    day.count = 1
    capture = capture_state(make([day]))
    missing, there = make([None]), make([Day(2021, 1, 1)])
    put_back(capture, missing, [HELD])
    put_back(capture, there, [HELD])
    assert missing.held == [None]
    assert there.held[0].count == 1


def test_arrays_of_objects_are_not_looked_into():
    """An array of objects is left alone."""
    setup = make(numpy.array([[1], None], dtype=object))
    capture = capture_state(setup)
    setup.held[1] = 2
    put_back(capture, setup, [HELD])
    assert compare_captures(capture, capture_state(setup)) == []
    assert setup.held[1] == 2
