"""What a capture holds of tensors, arrays, numbers and generators: it sees a change, and puts the value back."""

from __future__ import annotations

import enum
import random

import numpy
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(1, 5),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor(2.5),
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.ones(2).to(torch.float8_e4m3fn),
        lambda: torch.tensor([1 + 2j, 3j]),
        lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last) + 1,
        lambda: torch.arange(1.0, 7.0).reshape(2, 3).T,
        lambda: nn.Parameter(torch.ones(3)),
    ],
    ids=["f32", "i64", "bool", "scalar", "bf16", "f8", "complex", "channels_last", "transposed", "parameter"],
)
def test_tensors_are_put_back_in_place(make):
    """A tensor of any dtype and stride gets its content back, and stays the same object."""
    made = make()
    objects = []

    def change(setup):
        objects.append(setup.held)
        with torch.no_grad():
            setup.held.zero_()

    held = round_trip(make, change)
    assert held[0] is objects[0]
    assert held[1] is objects[1]
    for tensor in held:
        assert torch.equal(tensor, made)
        assert (tensor.dtype, tensor.stride(), type(tensor)) == (made.dtype, made.stride(), type(made))


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_stay_sparse(layout):
    """A sparse tensor comes back with its layout and content."""
    for tensor in round_trip(
        lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(layout=layout),
        lambda setup: setattr(setup, "held", setup.held * 2),
    ):
        assert tensor.layout is layout
        assert tensor.to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]


def test_a_missing_tensor_is_built_with_its_kind():
    """Where there is no tensor to write to, a new one has the shape, dtype, strides, grad flag and type of the old."""
    image = torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last)
    values = {"image": image, "weight": nn.Parameter(torch.ones(2), requires_grad=False), "leaf": torch.ones(1)}
    values["leaf"].requires_grad_()
    capture = capture_state(holding(values))
    fresh = holding(None)
    put_back(capture, fresh, [HELD])
    made = fresh.held
    assert torch.equal(made["image"], image)
    assert made["image"].is_contiguous(memory_format=torch.channels_last)
    assert (type(made["weight"]), made["weight"].requires_grad) == (nn.Parameter, False)
    assert (type(made["leaf"]), made["leaf"].requires_grad) == (torch.Tensor, True)


def test_a_tensor_that_is_part_of_a_graph_is_captured_by_its_content():
    """A kept activation is captured without its graph, and the graph can still be used."""
    weight = torch.ones(2, requires_grad=True)
    setup = holding(weight * 3)
    capture = capture_state(setup)
    setup.held.sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]
    fresh = holding(None)
    put_back(capture, fresh, [HELD])
    assert fresh.held.is_leaf
    assert fresh.held.tolist() == [3.0, 3.0]


def test_tensors_that_cannot_be_written_to_are_replaced():
    """An expanded tensor, and one made in inference mode, give way to a new one."""
    with torch.inference_mode():
        outputs = torch.ones(2)
    fresh = holding([torch.zeros(1).expand(2), outputs])
    put_back(capture_state(holding([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])), fresh, [HELD])
    assert [tensor.tolist() for tensor in fresh.held] == [[1.0, 2.0], [3.0, 4.0]]
    assert outputs.tolist() == [1.0, 1.0]


def test_tensors_without_content_are_left_alone():
    """Meta tensors and parameters without a shape have no state."""
    setup = holding([torch.ones(2, device="meta"), nn.LazyLinear(2)])
    capture = capture_state(setup)
    put_back(capture, setup, capture.pieces)
    assert compare_captures(capture, capture_state(setup)) == []
    assert setup.held[0].device.type == "meta"
    assert setup.held[1].has_uninitialized_params()


def test_nested_tensors_are_listed_as_uncopied():
    """A tensor of a layout that cannot be made dense is named, not captured."""
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert capture_state(holding(ragged)).uncopied == {"setup.held": "NestedTensor"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8", "bool", "complex64", "<U3", ">f4", "M8[s]"])
def test_arrays_are_put_back_in_place(dtype):
    """A numpy array of any dtype but object gets its content back in place."""
    objects = []

    def make():
        return numpy.array([[0, 1], [1, 1]]).astype(dtype)

    def change(setup):
        objects.append(setup.held)
        setup.held[0, 1] = setup.held[0, 0]

    held = round_trip(make, change)
    assert held[0] is objects[0]
    for array in held:
        assert array.dtype == make().dtype
        assert (array == make()).all()


def test_arrays_are_built_where_they_are_missing_or_of_another_shape():
    """An array is built, writeable, where there is None, a shorter one, or one that cannot be written to."""
    capture = capture_state(holding([numpy.arange(3.0)] * 1 + [numpy.arange(3), numpy.arange(2)]))
    frozen = numpy.zeros(2, dtype=int)
    frozen.flags.writeable = False
    fresh = holding([None, numpy.zeros(1), frozen])
    put_back(capture, fresh, [HELD])
    assert [array.tolist() for array in fresh.held] == [[0.0, 1.0, 2.0], [0, 1, 2], [0, 1]]
    assert all(array.flags.writeable for array in fresh.held)


def test_an_array_in_whose_place_stands_another_thing():
    """What was a number in the capture and is an array now becomes the number again."""
    setup = holding(None)
    capture = capture_state(setup)
    setup.held = numpy.ones(2)
    put_back(capture, setup, [HELD])
    assert setup.held is None


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (3, 4),
        (0.5, 0.25),
        (True, False),
        (1 + 2j, 2j),
        ("a", "b"),
        (b"a", b"b"),
        (None, 0),
        (Phase.WARM, Phase.COLD),
        (range(3), range(4)),
        (torch.float32, torch.float16),
        (torch.Size([1]), torch.Size([2])),
        (numpy.float32(0.5), numpy.float32(1.5)),
        (numpy.int64(3), numpy.int64(4)),
        (numpy.bool_(True), numpy.bool_(False)),
    ],
    ids=repr,
)
def test_immutable_values(value, other):
    """Numbers, strings, members of enums, dtypes and numpy's scalars come back as they are, with their type."""
    for held in round_trip(lambda: value, lambda setup: setattr(setup, "held", other)):
        assert held == value
        assert type(held) is type(value)


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (lambda: random.Random(1), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    "numpy": (lambda: numpy.random.default_rng(1), lambda g: g.normal(size=3).tolist()),
    "numpy Philox": (
        lambda: numpy.random.Generator(numpy.random.Philox(1)),
        lambda g: g.integers(0, 9, 3, dtype=numpy.int32).tolist(),
    ),
    "numpy RandomState": (lambda: numpy.random.RandomState(1), lambda g: g.randn(3).tolist()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators(name):
    """A private generator goes on from where it was, in place, to the cached second normal number."""
    make, draw = GENERATORS[name]
    generator = make()
    draw(generator)  # an odd number of normal ones, the rest of a pair is kept
    setup = holding(generator)
    capture = capture_state(setup)
    expected = draw(generator)
    (difference,) = compare_captures(capture, capture_state(setup))
    assert (difference.piece, difference.kind) == (HELD, "generator")
    fresh = holding(make())
    own = fresh.held
    for target in (setup, fresh, fresh):  # twice: the capture is not used up
        put_back(capture, target, [HELD])
        assert draw(target.held) == expected
    assert setup.held is generator
    assert fresh.held is own


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("other", [None, "a string", numpy.random.Generator(numpy.random.SFC64(3))], ids=str)
def test_generators_are_built_where_there_is_none(name, other):
    """Where a generator is missing, or is of another kind, a new one stands in the right state."""
    make, draw = GENERATORS[name]
    capture = capture_state(holding(make()))
    fresh = holding(other)
    put_back(capture, fresh, [HELD])
    assert draw(fresh.held) == draw(make())


def test_the_systems_generator_has_no_state():
    """random.SystemRandom is not looked into."""
    setup = holding(random.SystemRandom())
    capture = capture_state(setup)
    put_back(capture, setup, [HELD])
    assert compare_captures(capture, capture_state(setup)) == []
    assert isinstance(setup.held, random.SystemRandom)
