"""Where things are put back: aliases, cycles, keys that are objects, shared memory, places that lack them."""

from __future__ import annotations

import copy
import threading

import numpy
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_outside, capture_state, compare_captures, put_back

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


def test_a_thing_in_two_places_is_one_thing_afterwards():
    """What was one object in two places of the capture is one again, in a setup where it was two, or none."""
    shared = [1, torch.ones(1)]
    capture = capture_state(make(Box(a=shared, b=shared, c={"again": shared})))
    for value in (Box(a=[0], b=[0]), None, Box(a=None, b=[3], c={"again": [4]})):
        fresh = make(value)
        put_back(capture, fresh, [HELD])
        held = fresh.held
        assert held.a[0] == 1
        assert held.a[1].tolist() == [1.0]
        assert held.b is held.a
        assert held.c["again"] is held.a


def test_two_things_in_one_place_are_two_afterwards():
    """What was two tensors, lists, arrays or generators in the capture does not end up in the one that is there now."""
    capture = capture_state(make(Box(a=torch.zeros(2), b=torch.ones(2), c=[1], d=[2])))
    tensor, numbers = torch.full((2,), 5.0), [0]
    fresh = make(Box(a=tensor, b=tensor, c=numbers, d=numbers))
    put_back(capture, fresh, [HELD])
    held = fresh.held
    assert (held.a.tolist(), held.b.tolist(), held.c, held.d) == ([0.0, 0.0], [1.0, 1.0], [1], [2])
    assert held.a is tensor
    assert held.c is numbers


def test_the_best_weights_are_not_written_into_the_model():
    """A copy of the weights in the capture, and the model's own state_dict in the setup: the model is left alone."""
    setup = make()
    setup.held = copy.deepcopy(setup.model.state_dict())
    capture = capture_state(setup)
    fresh = make()
    fresh.held = fresh.model.state_dict()
    before = copy.deepcopy(fresh.held)
    put_back(capture, fresh, [HELD])
    assert all(torch.equal(value, before[name]) for name, value in fresh.model.state_dict().items())
    assert all(torch.equal(value, setup.held[name]) for name, value in fresh.held.items())


def test_views_of_one_memory_stay_views():
    """A flat buffer and views of it, shared in the capture and in the setup, are written to in place."""
    flat = torch.arange(4.0)
    capture = capture_state(make(Box(flat=flat, parts=[flat[:2], flat[2:]])))
    other = torch.zeros(4)
    fresh = make(Box(flat=other, parts=[other[:2], other[2:]]))
    put_back(capture, fresh, [HELD])
    other.add_(1)
    assert [part.tolist() for part in fresh.held.parts] == [[1.0, 2.0], [3.0, 4.0]]


def test_references_to_the_setup_lead_to_the_new_setup():
    """A trainer that refers to the setup, its model, optimizer, layers, weights or state finds the new ones."""

    def build():
        setup = make(state={"log": [1]}, model=nn.Sequential(nn.Linear(2, 1)))
        setup.held = Box(
            setup=setup,
            model=setup.model,
            layer=setup.model[0],
            weight=setup.model[0].weight,
            optimizer=setup.optimizer,
            optimizers=setup.optimizers,
            log=setup.state["log"],
            step=3,
        )
        return setup

    capture = capture_state(build())
    fresh = build()
    fresh.held = Box(setup=None)
    put_back(capture, fresh, [HELD])
    held = fresh.held
    assert held.setup is fresh
    assert held.model is fresh.model
    assert held.layer is fresh.model[0]
    assert held.weight is fresh.model[0].weight
    assert held.optimizer is fresh.optimizer
    assert held.optimizers["optimizer"] is fresh.optimizer
    assert held.log is fresh.state["log"]
    assert held.step == 3


def test_an_alias_of_another_piece_leaves_that_alone():
    """A piece that refers to a list of another piece refers to the one that is there, which is not changed."""

    def build(items):
        setup = make(items)
        setup.later = Box(log=setup.held, count=len(items))
        return setup

    capture = capture_state(build([1, 2]))
    fresh = build([7])
    put_back(capture, fresh, [Piece("attribute", "later")])
    assert (fresh.held, fresh.later.count) == ([7], 2)
    assert fresh.later.log is fresh.held
    put_back(capture, fresh, capture.pieces)
    assert fresh.held == [1, 2]
    assert fresh.later.log is fresh.held


def test_things_that_contain_themselves():
    """Objects, lists, dicts and tuples in cycles are captured, compared and put back."""

    def build(number):
        node, items, table = Box(number=number), [number], {"n": number}
        node.me, node.other = node, Box(back=node)
        items.append(items)
        table["self"] = (table, items)
        return Box(node=node, items=items, table=table)

    capture = capture_state(make(build(1)))
    assert compare_captures(capture, capture_state(make(build(1)))) != []  # other weights
    for value in (build(2), None):
        fresh = make(value)
        put_back(capture, fresh, [HELD])
        held = fresh.held
        assert (held.node.number, held.items[0], held.table["n"]) == (1, 1, 1)
        assert held.node.me is held.node
        assert held.node.other.back is held.node
        assert held.items[1] is held.items
        assert held.table["self"][0] is held.table
        assert [d for d in compare_captures(capture, capture_state(fresh)) if d.piece == HELD] == []


def test_keys_that_are_parameters_or_modules():
    """A dict keyed by parameters, modules, and one's own objects is put back under the keys of the new setup."""

    def build(offset):
        setup = make(model=nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
        own = Box(name="own")
        entries = [*setup.model.parameters(), setup.model[1], own]
        setup.held = {key: index + offset for index, key in enumerate(entries)}
        setup.own = own
        return setup, [*setup.model.parameters(), setup.model[1], own]

    capture = capture_state(build(0)[0])
    fresh, keys = build(5)
    assert len([d for d in compare_captures(capture, capture_state(fresh)) if d.piece == HELD]) == 4
    put_back(capture, fresh, [HELD])
    assert [fresh.held[key] for key in keys] == [0, 1, 2, 3]
    assert len(fresh.held) == 4
    fresh.held = {keys[2]: 8, keys[0]: 9}
    put_back(capture, fresh, [HELD])
    assert [fresh.held[key] for key in keys[:3]] == [0, 1, 2]
    assert [vars(key) for key in fresh.held if isinstance(key, Box)] == [{"name": "own"}]


def test_sets_of_modules():
    """Of a set of parameters and modules those of the new setup are put back; what nothing names stays in it."""
    setup = make(model=nn.Sequential(nn.Linear(1, 1)))
    weight, bias = setup.model.parameters()
    lock = Box()
    setup.held = {weight, lock, "a"}
    capture = capture_state(setup)
    setup.held.symmetric_difference_update({weight, bias, "a"})
    put_back(capture, setup, [HELD])
    assert setup.held == {weight, lock, "a"}


def test_entries_come_and_go():
    """What the capture has is added, and what it lacks is removed: entries of state, attributes, keys, gradients."""
    setup = make({"kept": 1}, state={"kept": [1], "number": 3})
    capture = capture_state(setup)
    setup.state["new"] = [2]
    del setup.state["kept"], setup.state["number"]
    setup.late = 3
    setup.held["more"] = 2
    setup.optimizer.param_groups[0]["extra"] = 1
    setup.model(torch.ones(1, 2)).sum().backward()
    setup.optimizer.step()
    differing = {difference.piece for difference in compare_captures(capture, capture_state(setup))}
    assert differing >= {Piece("state", "new"), Piece("attribute", "late"), Piece("gradients")}
    put_back(capture, setup, differing)
    assert compare_captures(capture, capture_state(setup)) == []
    assert setup.state == {"kept": [1], "number": 3}
    assert not hasattr(setup, "late")
    assert setup.model.weight.grad is None
    assert len(setup.optimizer.state) == 0


def test_gradients_are_copies():
    """Accumulating onto a gradient that was put back leaves the capture alone."""
    setup = make()
    setup.model(torch.ones(1, 2)).sum().backward()
    capture = capture_state(setup)
    for fresh in (make(), make()):
        put_back(capture, fresh, [Piece("gradients")])
        assert fresh.model.weight.grad.tolist() == [[1.0, 1.0]]
        fresh.model.weight.grad.zero_()


def test_sparse_gradients_stay_sparse():
    """The gradient of an embedding is put back as a sparse one, which its optimizer needs."""
    setup = make(model=nn.Embedding(4, 2, sparse=True))
    setup.model(torch.tensor([1, 3])).sum().backward()
    capture = capture_state(setup)
    fresh = make(model=nn.Embedding(4, 2, sparse=True))
    put_back(capture, fresh, [Piece("gradients")])
    grad = fresh.model.weight.grad
    assert (grad.layout, grad.sparse_dim()) == (torch.sparse_coo, 1)
    assert torch.equal(grad.to_dense(), setup.model.weight.grad.to_dense())


def test_what_cannot_be_built_stays():
    """A module, an optimizer, a library's scheduler or scaler that the setup lacks is not made up."""
    setup = make(state={"ema": nn.Linear(1, 1)}, scaler=torch.amp.GradScaler("cpu"))
    setup.schedulers["main"] = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1)
    setup.optimizers["second"] = torch.optim.Adam(setup.model.parameters())
    capture = capture_state(setup)
    fresh = make(state={"ema": None})
    put_back(capture, fresh, capture.pieces)
    left = {difference.piece for difference in compare_captures(capture, capture_state(fresh))}
    assert fresh.state == {"ema": None}
    assert fresh.scaler is None
    assert fresh.schedulers == {}
    assert left == {
        Piece("state", "ema"),
        Piece("scaler"),
        Piece("scheduler", "main"),
        Piece("optimizer state", "second"),
        Piece("param groups", "second"),
    }


def test_a_stateful_thing_of_another_type_is_left_alone():
    """The state of a scheduler is not loaded into one of another class."""
    capture = capture_state(make(torch.optim.lr_scheduler.StepLR(make().optimizer, 3)))
    other = torch.optim.lr_scheduler.ExponentialLR(make().optimizer, 0.5)
    fresh = make(other)
    put_back(capture, fresh, [HELD])
    assert fresh.held is other
    assert (other.gamma, hasattr(other, "step_size")) == (0.5, False)


def test_things_outside_of_a_setup():
    """Globals and cells are captured by name, and put back through the functions that get and set them."""
    places = {"total": 1, "items": [1]}
    capture = capture_outside(places | {"gone": 3, "loose": iter([1])})
    items = places["items"]
    items.append(2)
    places["total"] = 5

    def access(name):
        return (lambda: places[name]), (lambda value: places.__setitem__(name, value))

    put_back(capture, None, capture.pieces, outside={name: access(name) for name in ("total", "items", "gone")})
    assert places == {"total": 1, "items": [1], "gone": 3}
    assert places["items"] is items


def test_an_outside_thing_that_cannot_be_built_is_not_set():
    """Nothing is stored where there is nothing, and nothing can be built."""
    capture = capture_outside({"ema": nn.Linear(1, 1), "lock": threading.Lock()})
    stored = []

    def nothing():
        raise LookupError

    put_back(capture, None, [Piece("outside", "ema")], outside={"ema": (nothing, stored.append)})
    assert stored == []


def test_a_capture_of_a_setup_may_have_things_outside():
    """What lies outside and refers to the setup is an alias of it."""
    setup = make([1])
    capture = capture_state(setup, outside={"log": setup.held, "count": 3})
    assert capture.pieces[Piece("outside", "count")].value == 3
    stored = {}
    access = {
        name: ((lambda: None), (lambda value, name=name: stored.update({name: value}))) for name in ("log", "count")
    }
    put_back(capture, setup, [Piece("outside", "log"), Piece("outside", "count")], outside=access)
    assert stored["log"] is setup.held
    assert stored["count"] == 3


def test_unknown_pieces_are_left_alone():
    """A piece that the capture does not have, of a kind that cannot be removed, changes nothing."""
    setup = make()
    capture = capture_state(setup)
    put_back(capture, setup, [Piece("scheduler", "none"), Piece("optimizer state", "other"), Piece("scaler")])
    assert compare_captures(capture, capture_state(setup)) == []


@pytest.mark.parametrize(
    "kind",
    [torch.ones, numpy.ones, lambda n: [n], lambda n: torch.Generator().manual_seed(n), lambda n: (n, [n])],
    ids=["tensor", "array", "list", "generator", "tuple"],
)
@pytest.mark.parametrize("there", [True, False])
def test_what_another_entry_refers_to_is_one_thing(kind, there):
    """An entry of state that refers to a later one is put back first, and both are one thing afterwards."""

    def build(number, held):
        return make(state={"first": {"of": held, "n": number}, "second": held})

    capture = capture_state(build(1, kind(1)))
    fresh = build(2, kind(1) if there else None)
    put_back(capture, fresh, [Piece("state", "second"), Piece("state", "first")])
    assert fresh.state["first"]["n"] == 1
    assert fresh.state["first"]["of"] is fresh.state["second"]
    other = build(3, None)
    put_back(capture, other, [Piece("state", "first"), Piece("state", "second")])
    assert other.state["first"]["of"] is other.state["second"]
    assert [d for d in compare_captures(capture, capture_state(other)) if d.piece.kind == "state"] == []


def test_rings_of_other_lengths_look_the_same():
    """The comparison of two structures that contain themselves in other ways ends."""

    def ring(length):
        nodes = [Box(number=1) for _ in range(length)]
        for index, node in enumerate(nodes):
            node.next = nodes[index - 1]
        return nodes[0]

    two, four = capture_outside({"ring": ring(2)}), capture_outside({"ring": ring(4)})
    assert compare_captures(two, four) == []
    broken = ring(3)
    broken.next.number = 2
    assert compare_captures(two, capture_outside({"ring": broken})) != []


def test_a_part_of_the_model_in_words():
    """A reference to a module of the model differs from nothing, and is said by the module's name."""
    setup = make(model=nn.Sequential(nn.Linear(1, 1)))
    setup.held = {"layer": setup.model[0]}
    before = capture_state(setup)
    setup.held["layer"] = None
    (difference,) = compare_captures(before, capture_state(setup))
    assert (difference.shown_a, difference.shown_b) == ("model.0", "None")
