"""Loaders of torchdata on a setup: the iterators that they have made are their position."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from tl_core import TrainingSetup, preserve_rng
from tl_resume import load_training_state, save_training_state, training_state
from tl_resume._format import write_state

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
# torchdata 0.11 with torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
FIT = "does not fit the setup, which is as it was:"


@pytest.fixture(autouse=True)
def _own_rng():
    with preserve_rng():
        yield


def loader(**options):
    return StatefulDataLoader(TensorDataset(torch.arange(20.0)), batch_size=4, shuffle=True, **options)


def build(form="lazy", **options):
    """A setup with a loader in its state, and its iterator: none yet, or made at once, as an attribute or an entry."""
    model = torch.nn.Linear(1, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state={"loader": loader(**options)})
    if form == "eager":
        setup.batches = iter(setup.state["loader"])
    elif form == "in the state":
        setup.state["batches"] = iter(setup.state["loader"])
    else:
        setup.batches = None
    return setup


def draw(setup):
    """The next batch, and a number that follows from the global generator."""
    place = setup.state if "batches" in setup.state else vars(setup)
    try:
        place["batches"] = place["batches"] or iter(setup.state["loader"])
        (batch,) = next(place["batches"])
    except StopIteration:
        place["batches"] = iter(setup.state["loader"])
        (batch,) = next(place["batches"])
    return [*batch.tolist(), torch.rand(()).item()]


@pytest.mark.parametrize(
    ("form", "num_drawn", "workers"),
    [("lazy", 1, 0), ("lazy", 3, 1), ("lazy", 7, 0), ("eager", 0, 0), ("eager", 3, 0), ("in the state", 7, 0)],
)
def test_loaders_go_on_where_they_were(tmp_path, form, num_drawn, workers):
    """However the iterator came about, batches and random numbers go on, over the end of an epoch of 5 batches too."""
    torch.manual_seed(0)
    setup = build(form, num_workers=workers)
    for _ in range(num_drawn):
        draw(setup)
    save_training_state(setup, tmp_path / "state")
    expected = [draw(setup) for _ in range(8 - workers * 4)]
    torch.manual_seed(1)
    resumed = build(form, num_workers=workers)
    load_training_state(resumed, tmp_path / "state")
    assert [draw(resumed) for _ in expected] == expected


def test_loader_saved_before_its_first_iterator(tmp_path):
    """What had no iterator when it was saved has none after loading, and gives the batches that it would have given."""
    setup = build()
    save_training_state(setup, tmp_path / "state")
    expected = draw(setup)
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert resumed.batches is None
    assert draw(resumed)[:4] == expected[:4]


def test_iterators_are_named_with_their_loader():
    """The state says which attribute is whose iterator; the position is in the loader's state alone."""
    state = training_state(build("eager"))
    assert (state["iterators"], state["attributes"]) == ({"attributes": {"batches": "state['loader']"}}, {})
    assert state["classes"] == {"optimizers['optimizer']": "SGD", "state['loader']": "StatefulDataLoader"}
    assert training_state(build())["iterators"] == {}


def test_an_iterator_that_was_none_when_saved(tmp_path):
    """An attribute that was None when saved is None again, though the fresh setup has an iterator there."""
    save_training_state(build(), tmp_path / "state")
    resumed = build("eager")
    load_training_state(resumed, tmp_path / "state")
    assert resumed.batches is None


def test_failing_puts_the_old_iterators_back(tmp_path):
    """When a loader cannot make its iterator, every iterator is the one that was there, at the place where it was."""

    def build_two():
        setup = build("in the state")
        setup.loader = loader()
        setup.batches = iter(setup.loader)
        return setup

    setup, reference = build_two(), build_two()
    draw(setup)
    state = training_state(build_two())
    write_state(tmp_path / "state", {**state, "attributes": {"loader": {"nothing": 1}}})
    before = setup.state["batches"], setup.batches
    with pytest.raises(ValueError) as caught:
        load_training_state(setup, tmp_path / "state")
    assert str(caught.value) == (
        f"{tmp_path / 'state'}: setup.loader could not be restored (AssertionError: State doesn't contain key "
        "'_num_yielded' expected for single process dataloader); the setup is as it was"
    )
    assert (setup.state["batches"], setup.batches) == before
    assert len([draw(setup) for _ in range(4)]) == len(list(reference.state["batches"])) - 1
    with pytest.raises(StopIteration):
        next(setup.state["batches"])


ALONE = "the iterator of a loader; keep the loader too in setup.state, and it is made anew at its position"


@pytest.mark.parametrize(
    ("saved", "fresh", "line"),
    [
        ("eager", None, f"attributes: unexpected batches; batches: {ALONE}"),
        ("eager", "lazy", f"setup.batches: it is plain data, the file has a state_dict(); {ALONE}"),
        ("lazy", "eager", f"setup.batches: it has a state_dict(), the file has plain data; {ALONE}"),
        (None, "eager", f"attributes: missing batches; batches: {ALONE}"),
    ],
)
def test_an_iterator_without_its_loader(tmp_path, saved, fresh, line):
    """An iterator whose loader is not on the setup does not come and go, and the message says what to do."""

    def alone(form):
        setup = build(form)
        del setup.state["loader"]
        if form is None:
            del setup.batches
        return setup

    save_training_state(alone(saved), tmp_path / "state")
    with pytest.raises(ValueError) as caught:
        load_training_state(alone(fresh), tmp_path / "state")
    assert str(caught.value) == f"{tmp_path / 'state'} {FIT}\n  {line}"


@pytest.mark.parametrize(
    ("iterators", "line"),
    [
        (
            {"attributes": {"model": "state['loader']"}},
            "model is another part of the setup, the file has an iterator of state['loader']",
        ),
        (
            {"attributes": {"it": "state['other']"}},
            "it was made by state['other'], which is no loader with a state here",
        ),
        ({"state": {"it": ["x"]}}, "it was made by ['x'], which is no loader with a state here"),
        ({"state": {3: "state['loader']"}}, "a name in it is no name"),
    ],
)
def test_iterators_that_a_file_makes_up(tmp_path, iterators, line):
    """A file cannot put an iterator in the place of a part of the setup, nor name what is not there."""
    write_state(tmp_path / "state", {**training_state(build()), "iterators": iterators})
    with pytest.raises(ValueError) as caught:
        load_training_state(build(), tmp_path / "state")
    assert str(caught.value) == f"{tmp_path / 'state'} {FIT}\n  iterators: {line}"


def test_own_iterators_have_their_own_state(tmp_path):
    """An iterator of one's own with a state_dict() is restored by it, and stays the object that it is."""

    class Counter:
        def __init__(self):
            self.count = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.count += 1
            return self.count

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    setup, resumed = build(), build()
    setup.numbers, resumed.numbers = Counter(), Counter()
    next(setup.numbers)
    save_training_state(setup, tmp_path / "state")
    kept = resumed.numbers
    load_training_state(resumed, tmp_path / "state")
    assert (resumed.numbers is kept, next(kept)) == (True, 2)
