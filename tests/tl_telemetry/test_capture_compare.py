"""The comparison of two captures: what counts as equal, and what is told of a difference."""

from __future__ import annotations

import math
import pickle

import numpy
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Piece, TensorDifference, capture_outside, capture_state, compare_captures, put_back

NAN, INF = math.nan, math.inf


def differences(a, b, **tolerance):
    return compare_captures(capture_outside({"x": a}), capture_outside({"x": b}), **tolerance)


def one(a, b, **tolerance):
    (difference,) = differences(a, b, **tolerance)
    assert difference.piece == Piece("outside", "x")
    return difference


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (NAN, float("nan")),
        (INF, INF),
        (0.0, -0.0),
        (numpy.int64(3), 3),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (1j, 1j),
        ([1] * 20, [1.0] * 20),
        ([NAN] * 20, [float("nan")] * 20),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.tensor([NAN, INF, 0.0]), torch.tensor([NAN, INF, -0.0])),
        (torch.tensor([complex(NAN, 1), 2j]), torch.tensor([complex(NAN, 1), 2j])),
        (numpy.array([NAN, 0.0]), numpy.array([NAN, -0.0])),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (len, max),
    ],
)
def test_equal(a, b):
    """NaN equals NaN, zero its negative, a number its twin of another type, a dict one of another order."""
    assert differences(a, b) == []


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (1, 2, ("1", "2")),
        (2**60, 2**60 + 1, (str(2**60), str(2**60 + 1))),
        (1, True, ("1", "True")),
        (INF, -INF, ("inf", "-inf")),
        (NAN, 1.0, ("nan", "1")),
        (None, 0, ("None", "0")),
        ("a" * 80, "b", ("'" + "a" * 56 + "...", "'b'")),
        ([1, 2], [1, 2, 3], ("a list of 2 items", "a list of 3 items")),
        ([1], (1,), ("a list of 1 item", "a tuple of 1 item")),
        ([0] * 20, [0] * 19 + [False], ("a list of 20 items", "a list of 20 items")),
        ([0] * 20, [0] * 21, ("a list of 20 items", "a list of 21 items")),
        (torch.ones(2), torch.ones(3), ("a float32 tensor of shape (2,)", "a float32 tensor of shape (3,)")),
        (torch.ones(2), torch.ones(2).double(), ("a float32 tensor of shape (2,)", "a float64 tensor of shape (2,)")),
        (torch.tensor(3), None, ("3", "None")),
        (numpy.ones(2), numpy.ones(3), ("a float64 array of shape (2,)", "a float64 array of shape (3,)")),
        (numpy.array(["a"]), numpy.array(["b"]), ("a <U1 array of shape (1,)", "a <U1 array of shape (1,)")),
        (nn.ReLU(), len, ("ReLU", "builtin_function_or_method")),
    ],
)
def test_different(a, b, shown):
    """Other values, types, lengths, shapes and dtypes differ; each side is said in a few words."""
    difference = one(a, b)
    assert (difference.path, difference.shown_a, difference.shown_b) == ((), *shown)
    assert difference.tensor is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 1.0], (2, 3, 2.0, (2,), (3.0, 1.0))),
        ([[1.0, 2.0]], [[1.0, NAN]], (1, 2, NAN, (0, 1), (2.0, NAN))),
        ([INF, 0.0], [1.0, 5.0], (2, 2, INF, (0,), (INF, 1.0))),
        ([INF, 0.0], [-INF, 0.0], (1, 2, INF, (0,), (INF, -INF))),
        ([INF, NAN], [0.0, 0.0], (2, 2, NAN, (1,), (NAN, 0.0))),
        ([1, 5], [1, 7], (1, 2, 2.0, (1,), (5, 7))),
        ([True, False], [True, True], (1, 2, 1.0, (1,), (False, True))),
        ([1j, 1.0], [1j, 1.0 + 2j], (1, 2, 2.0, (1,), (1 + 0j, 1 + 2j))),
        (3.0, 4.0, (1, 1, 1.0, (), (3.0, 4.0))),
        ([255, 0], [0, 0], (1, 2, 255.0, (0,), (255, 0))),
    ],
)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_figures_of_a_difference(a, b, expected, library):
    """How many elements differ, of how many, by how much at most, where, and the values there."""
    make = torch.tensor if library == "torch" else numpy.array
    found = one(make(a), make(b)).tensor
    assert repr(found) == repr(TensorDifference(*expected))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_half_precision_complex_numbers():
    """Complex numbers of two halves, for which torch has no comparison, are compared as wider ones."""
    a, b = (torch.tensor([value], dtype=torch.complex32) for value in (1j, 2j))
    assert differences(a, a.clone()) == []
    assert one(a, b).tensor == TensorDifference(1, 1, 1.0, (0,), (1j, 2j))


def test_unsigned_and_wide_integers():
    """Integers are compared exactly, those that no float can hold, and those without a sign, too."""
    wide = one(torch.tensor([2**60]), torch.tensor([2**60 + 1])).tensor
    assert (wide.num_different, wide.values) == (1, (2**60, 2**60 + 1))
    small = one(torch.tensor([1], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)).tensor
    assert small.largest == 254.0


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "equal"),
    [
        (1.0, 1.001, {"rtol": 1e-2}, True),
        (1.0, 1.1, {"rtol": 1e-2}, False),
        (0.0, 1e-9, {"atol": 1e-8}, True),
        (100, 101, {"rtol": 0.1}, False),
        (100, 100.5, {"rtol": 0.1}, True),
        (INF, 1e308, {"rtol": 1.0}, False),
        (1 + 1j, 1 + 1.001j, {"rtol": 1e-2}, True),
        (numpy.float32(1.0), 1.001, {"rtol": 1e-2}, True),
        ([1.0] * 20, [1.001] * 20, {"rtol": 1e-2}, True),
        ([1.0] * 20, [1.0] * 19 + [1.1], {"rtol": 1e-2}, False),
        (torch.tensor([1e-6, 100.0]), torch.tensor([0.5, 100.0]), {"rtol": 1e-2}, True),
        (torch.tensor([1e-6, 1.0]), torch.tensor([0.5, 1.0]), {"rtol": 1e-2}, False),
        (torch.tensor([INF, 1.0]), torch.tensor([INF, 1.5]), {"rtol": 1e-2}, False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), {"rtol": 10.0, "atol": 10.0}, False),
        (torch.tensor([NAN]), torch.tensor([1.0]), {"atol": INF}, False),
        (numpy.array([1.0]), numpy.array([1.001]), {"rtol": 1e-2}, True),
        (numpy.array([1]), numpy.array([2]), {"atol": 9.0}, False),
    ],
)
def test_tolerances(a, b, tolerance, equal):
    """Floats may lie apart, relative to the largest finite magnitude of their tensor; integers may not."""
    assert (differences(a, b, **tolerance) == []) is equal


def test_the_place_of_a_difference():
    """A difference names the keys and indices on the way; a missing side is None, and said as nothing."""
    a = {"runs": [{"loss": 1.0, "old": 2}], "same": 1}
    b = {"runs": [{"loss": 1.5, "new": 3}], "same": 1}
    found = differences(a, b)
    assert [(d.path, d.shown_a, d.shown_b, d.kind) for d in found] == [
        (("runs", 0, "loss"), "1", "1.5", "number"),
        (("runs", 0, "old"), "2", "nothing", "number"),
        (("runs", 0, "new"), "nothing", "3", "number"),
    ]
    assert [(d.plain_a, d.plain_b) for d in found] == [(1.0, 1.5), (2, None), (None, 3)]


class Warm:
    """A phase of a loop without attributes."""


class Cold:
    """Another one."""


def test_objects_of_different_classes_differ():
    """An object that is replaced by one of another class differs, even if neither has attributes."""
    difference = one(Warm(), Cold())
    assert (difference.shown_a, difference.shown_b, difference.type_name) == ("Warm", "Cold", "Warm")
    assert difference.kind == "other"


def test_tensors_of_a_difference():
    """The tensors of both sides can be read, where they are tensors."""
    difference = one(torch.tensor([1.0]), torch.tensor([2.0]))
    assert (difference.kind, difference.type_name) == ("tensor", "")
    assert (difference.tensor_a().tolist(), difference.tensor_b().tolist()) == ([1.0], [2.0])
    assert one(1, 2).tensor_a() is None


def make_setup(value=1.0):
    model = nn.Linear(2, 2)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    setup.held = {"counts": list(range(20)), "pair": (1, [Warm()]), "function": len, "array": numpy.full(2, value)}
    setup.batches = iter([1, 2])
    return setup


def digest_only(tensor):
    return None, repr(tensor.tolist()).encode()


def test_digests_stand_for_contents():
    """A capture that keeps digests only is compared by them; it tells that tensors differ, not by how much."""
    setup = make_setup()
    before = capture_state(setup, keep=digest_only)
    assert compare_captures(before, capture_state(setup, keep=digest_only)) == []
    with torch.no_grad():
        setup.model.weight.add_(1)
    (difference,) = compare_captures(before, capture_state(setup, keep=digest_only))
    assert (difference.piece, difference.path, difference.tensor) == (Piece("weights"), ("weight",), None)
    assert difference.tensor_a() is None
    assert before.digest_at(Piece("weights"), ("bias",)) == repr(setup.model.bias.tolist()).encode()
    assert before.digest_at(Piece("weights"), ("none",)) is None
    assert [(piece, path) for piece, path, _ in before.digests()] == [
        (Piece("weights"), ("weight",)),
        (Piece("weights"), ("bias",)),
    ]
    assert [(path, shape) for path, _, shape in before.tensors(Piece("weights"))] == [
        (("weight",), (2, 2)),
        (("bias",), (2,)),
    ]
    assert list(before.tensors(Piece("none"))) == []


def test_a_digest_alone_cannot_be_put_back():
    """Where only digests were kept, putting back says so."""
    setup = make_setup()
    capture = capture_state(setup, keep=digest_only)
    with pytest.raises(RuntimeError, match=r"^only the digest of this tensor was kept$"):
        put_back(capture, setup, [Piece("weights")])


def test_a_portable_capture_is_the_same_in_another_process():
    """A portable capture can be pickled, and equals the one that it was made of."""
    setup = make_setup()
    capture = capture_state(setup, keep=digest_only)
    sent = pickle.loads(pickle.dumps(capture.portable()))
    assert compare_captures(capture, sent) == []
    assert compare_captures(sent, capture) == []
    setup.held["pair"][1][0].late = 1
    (difference,) = compare_captures(sent, capture_state(setup, keep=digest_only))
    assert difference.path == ("pair", 1, 0, "late")


def test_pieces_that_only_one_capture_has():
    """A piece of one side only is a difference from nothing."""
    setup = make_setup()
    before = capture_state(setup)
    setup.late = 3
    after = capture_state(setup)
    (more,), (less,) = compare_captures(before, after), compare_captures(after, before)
    assert (more.piece, more.shown_a, more.shown_b) == (Piece("attribute", "late"), "nothing", "3")
    assert (less.shown_a, less.shown_b) == ("3", "nothing")
