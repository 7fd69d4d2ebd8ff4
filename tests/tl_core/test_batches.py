from __future__ import annotations

import sys
from collections import namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tl_core import Batches

ALLOWED = (
    "data must be one batch, a list of batches, an iterable of batches such as a DataLoader, "
    "or a function from the step index to a batch"
)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Plain:
    x: torch.Tensor


class Graph:
    def __init__(self):
        self.x = torch.ones(2)

    def to(self, device):
        return self

    def __iter__(self):
        return iter([("x", self.x)])


class Map(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.ones(2)


class Items:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.ones(2)


class Columns:
    column_names = ("x",)

    def __iter__(self):
        return iter([{"x": 1}])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(2)])


def x(*shape, **kwargs):
    return torch.ones(*(shape or (4, 3)), **kwargs)


def labels(size=4):
    return torch.zeros(size, dtype=torch.long)


def batches(data, steps=4):
    return Batches(data, steps, device="cpu")


ONE_BATCH = {
    "tensor": (x, "a Tensor"),
    "array": (lambda: numpy.ones((4, 3)), "a ndarray"),
    "tuple": (lambda: (x(), labels()), "a tuple"),
    "tuple of tuples": (lambda: ((x(), labels()), (x(), labels())), "a tuple"),
    "namedtuple": (lambda: Pair(x(), labels()), "a Pair"),
    "dict": (lambda: {"x": x()}, "a dict"),
    "dataclass": (lambda: Plain(x()), "a Plain"),
    "object with to": (Graph, "a Graph"),
    "collated": (lambda: [x(), labels()], "a list of 2 tensors"),
    "collated, one dtype": (lambda: [x(), x(4, 1)], "a list of 2 tensors"),
    "collated with dict": (lambda: [{"x": x()}, labels()], "a list of 2 elements: dict, tensor"),
    "collated dicts": (lambda: [{"x": x()}, {"y": labels()}], "a list of 2 dicts"),
    "collated lists": (lambda: [[x(), x()], [labels(), x()]], "a list of 2 lists"),
    "strings": (lambda: ["a", "b"], "a list of 2 strs"),
    "string and tensor": (lambda: ["a", x()], "a list of 2 elements: str, tensor"),
}


@pytest.mark.parametrize("name", ONE_BATCH)
def test_one_batch_is_used_in_every_step(name):
    """One batch, in whatever form, is the same object in each step, and the form says what it was taken for."""
    make, kind = ONE_BATCH[name]
    data = make()
    found = batches(data)
    assert found.form == f"one batch ({kind}), used in every step"
    assert all(found.batch(step) is data for step in range(4))


LISTS = {
    "tuples": lambda: [(x(), labels()), (x(), labels())],
    "tuples of other structure": lambda: [(x(), labels()), (x(), labels(), x())],
    "collated lists": lambda: [[x(), labels()], [x(2, 3), labels(2)]],
    "dicts": lambda: [{"x": x(), "name": ["a"] * 4}, {"x": x(2, 3), "name": ["b"] * 2}],
    "padded to other lengths": lambda: [{"ids": labels(8).view(2, 4)}, {"ids": labels(6).view(2, 3)}],
    "tensors": lambda: [x(), x(2, 3)],
    "arrays": lambda: [numpy.ones((4, 3)), numpy.ones((2, 3))],
    "dataclasses": lambda: [Plain(x()), Plain(x())],
    "objects": lambda: [Graph(), Graph()],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_batches_is_cycled(name):
    """Elements of one structure, tensors of one kind, and plain tuples are batches; sizes do not matter."""
    data = LISTS[name]()
    found = batches(data, 3)
    assert found.form == "a list of 2 batches, cycled"
    assert [found.batch(step) is data[step % 2] for step in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("length", "form"),
    [(1, "a list of 1 batch, cycled"), (4, "a list of 4 batches"), (6, "the first 4 of a list of 6 batches")],
)
def test_the_form_says_how_much_of_a_list_is_used(length, form):
    """The list is cycled, used up, or used in part."""
    assert batches([(x(), labels())] * length).form == form


def test_a_loader_is_iterated_again_when_it_ends():
    """A re-iterable loader serves a longer run, with a fresh iterator each time."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    found = batches(loader, 5)
    assert found.form == "an iterable (DataLoader), iterated again when it ends"
    assert [found.batch(step)[0].tolist() for step in range(5)] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]


def test_nothing_is_drawn_before_it_is_asked_for():
    """Making an iterator of a DataLoader moves torch's generator: that happens in the loop, not before."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    state = torch.get_rng_state()
    found = batches(loader)
    assert torch.equal(torch.get_rng_state(), state)
    found.batch(0)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_run_may_begin_in_the_middle():
    """Batches before the first one asked for are drawn and dropped, and the last one may be asked for again."""
    found = batches(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    assert found.batch(2)[0].tolist() == [4, 5]
    assert found.batch(2) is found.batch(2)
    with pytest.raises(ValueError) as caught:
        found.batch(1)
    assert str(caught.value) == "the batch of step 1 was already drawn from data; batches are drawn in order"


def test_a_generator_gives_its_batches_once():
    """A one-shot iterator that is too short says how many batches it gave, when the next one is asked for."""
    found = batches((x() for _ in range(3)), 5)
    assert found.form == "a one-shot iterator (generator)"
    for step in range(3):
        found.batch(step)
    with pytest.raises(ValueError) as caught:
        found.batch(3)
    assert str(caught.value) == (
        "data is a one-shot iterator (generator) that gave 3 batches, but steps=5 needs 5: "
        "pass more batches, a list, or a loader that can be iterated again"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter(()), "data (tuple_iterator) is an exhausted iterator: it is empty, and steps=4 needs 4"),
        (DataLoader([]), "data (DataLoader) gave no batches: it is empty, and steps=4 needs 4"),
    ],
    ids=["iterator", "loader"],
)
def test_an_iterable_without_batches_is_an_error(data, message):
    """Empty data is found when the first batch is asked for."""
    with pytest.raises(ValueError) as caught:
        batches(data).batch(0)
    assert str(caught.value) == message


def test_a_function_is_asked_with_the_step():
    """A function of the step index gives each step its batch."""

    def make(step):
        return torch.full((2,), step)

    found = batches(make)
    assert found.form == f"a function of the step index ({make.__qualname__})"
    assert [found.batch(step).tolist() for step in (0, 5)] == [[0, 0], [5, 5]]


def test_a_callable_object_is_a_function():
    """An object with __call__ is named by its class."""

    class Sampler:
        def __call__(self, step):
            return step

    assert batches(Sampler()).form == "a function of the step index (Sampler)"


def test_a_function_that_returns_nothing_is_an_error():
    """A missing return is named, with the step."""

    def forgets(step):
        torch.full((2,), step)

    with pytest.raises(TypeError) as caught:
        batches(forgets).batch(2)
    assert str(caught.value) == (
        f"data as a function ({forgets.__qualname__}) returned None at step 2; return the batch "
        "(anything else, for example the step index, if the step makes its own data)"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_an_error_of_the_data_passes_with_a_note():
    """The person's own exception comes through, with a note of the step."""

    def broken(step):
        raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        batches(broken).batch(3)
    assert caught.value.__notes__ == ["raised by data at step 3"]


def test_batches_are_moved_to_the_device():
    """A batch is handed out on the run's device, and the data keeps its own."""
    data = [(x(), labels())]
    assert [t.device.type for t in Batches(data, 1, device="meta").batch(0)] == ["meta", "meta"]
    assert data[0][0].device.type == "cpu"


def generate():
    yield x()


def nothing():
    return x()


def wrap(kind):
    return (
        f"data is a dataset ({kind}), whose items are not batches: wrap it in a DataLoader, "
        "DataLoader(data, batch_size=...), or with batch_size=None if it makes batches itself"
    )


BAD_DATA = {
    "None": (None, TypeError, f"{ALLOWED}; got None"),
    "string": ("train", TypeError, f"{ALLOWED}; got a str"),
    "number": (3, TypeError, f"{ALLOWED}; got an int"),
    "module": (nn.Linear(1, 1), TypeError, f"{ALLOWED}; got a Linear"),
    "class": (DataLoader, TypeError, f"{ALLOWED}; got the class DataLoader"),
    "object": (object(), TypeError, f"{ALLOWED}; got an object"),
    "dataset": (Map(), TypeError, wrap("Map")),
    "iterable dataset": (Stream(), TypeError, wrap("Stream")),
    "dataset by its methods": (Items(), TypeError, wrap("Items")),
    "dataset by its columns": (Columns(), TypeError, wrap("Columns")),
    "empty list": ([], ValueError, f"data is an empty list; {ALLOWED}"),
    "empty tuple": ((), ValueError, f"data is an empty tuple; {ALLOWED}"),
    "empty dict": ({}, ValueError, f"data is an empty dict; {ALLOWED}"),
    "generator function": (
        generate,
        TypeError,
        "data is the generator function generate: pass what it returns, generate()",
    ),
    "function without argument": (
        nothing,
        TypeError,
        "data as a function takes the step index as its only argument; got nothing()",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_without_batches_is_refused(name):
    """The error names what was got and what is allowed."""
    data, error, message = BAD_DATA[name]
    with pytest.raises(error) as caught:
        batches(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (0, ValueError, "steps must be at least 1, got 0"),
        (-2, ValueError, "steps must be at least 1, got -2"),
        (2.0, TypeError, "steps must be an int, got float 2.0"),
        (True, TypeError, "steps must be an int, got bool True"),
    ],
)
def test_bad_steps_are_refused(steps, error, message):
    """steps is a positive int."""
    with pytest.raises(error) as caught:
        batches(x(), steps)
    assert str(caught.value) == message


def test_a_negative_step_is_refused():
    """Steps count from 0."""
    with pytest.raises(ValueError) as caught:
        batches(x()).batch(-1)
    assert str(caught.value) == "step must be at least 0, got -1"
