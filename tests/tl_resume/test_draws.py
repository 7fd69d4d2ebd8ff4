import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tl_core import TrainingSetup
from tl_resume._check import _draws
from tl_resume._check._content import content_digest
from tl_resume._check._ledger import Drawn, Ledger


def make_setup(**state):
    model = nn.Linear(2, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)


def loader(cls=DataLoader, count=8, **options):
    return cls(TensorDataset(torch.arange(2.0 * count).reshape(count, 2)), batch_size=2, **options)


def samples(*indices):
    return [torch.stack([torch.tensor([2.0 * i, 2.0 * i + 1]) for i in indices])]


def drawn(*indices, name="setup.loader"):
    return Drawn(name, content_digest(samples(*indices)), indices)


def draw_steps(setup, batches, num_before=0):
    """Draw, with one batch a step after those before the first."""
    with Ledger(setup) as ledger:
        for _ in range(num_before):
            next(batches)
        for step in range(2):
            ledger.begin_step(step)
            next(batches)
    return ledger.drawn


def test_draws_have_the_indices_of_their_batch():
    """A loader is named by its path in the setup; what is drawn before the first step stands at -1."""
    setup = make_setup()
    setup.loader = loader()
    assert draw_steps(setup, iter(setup.loader), 1) == {-1: (drawn(0, 1),), 0: (drawn(2, 3),), 1: (drawn(4, 5),)}
    setup = make_setup(data={"train": 1}, loader=loader())
    named = draw_steps(setup, iter(setup.state["loader"]))
    assert named == {0: (drawn(0, 1, name="setup.state['loader']"),), 1: (drawn(2, 3, name="setup.state['loader']"),)}
    setup.trainer = type("Plain", (), {})()
    setup.trainer.loader, setup.pair = loader(), [None, loader()]
    assert draw_steps(setup, iter(setup.trainer.loader))[0] == (drawn(0, 1, name="setup.trainer.loader"),)
    assert draw_steps(setup, iter(setup.pair[1]))[0] == (drawn(0, 1, name="setup.pair[1]"),)
    assert draw_steps(setup, iter(loader()))[0] == (drawn(0, 1, name="DataLoader"),)


@pytest.mark.parametrize("entered", ["before", "in the middle"])
def test_workers_draw_ahead(entered):
    """With workers each batch has its own indices, also of an iterator that was asked ahead before, where known."""
    setup = make_setup()
    setup.loader = loader(num_workers=2, persistent_workers=True, shuffle=False)
    if entered == "before":
        with Ledger(setup) as ledger:
            for step in range(2):
                ledger.begin_step(step)
                for _ in setup.loader:
                    pass
        epoch = (drawn(0, 1), drawn(2, 3), drawn(4, 5), drawn(6, 7))
        assert ledger.drawn == {0: epoch, 1: epoch}
    else:
        setup.loader = loader(count=12, num_workers=1, prefetch_factor=1)
        batches = iter(setup.loader)
        next(batches)
        unknown = Drawn("setup.loader", drawn(2, 3).content, None)
        assert draw_steps(setup, batches) == {0: (unknown,), 1: (drawn(4, 5),)}


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_loaders_without_indices():
    """An iterable data set and a sampler of names give no indices; a loader without batches gives single ones."""
    setup = make_setup()
    setup.loader = DataLoader(Numbers())
    assert [one.indices for (one,) in draw_steps(setup, iter(setup.loader)).values()] == [None, None]
    setup.loader = DataLoader({"a": 1, "b": 2}, sampler=["a", "b"])
    assert [one.indices for (one,) in draw_steps(setup, iter(setup.loader)).values()] == [None, None]
    setup.loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=None)
    assert [one.indices for (one,) in draw_steps(setup, iter(setup.loader)).values()] == [(0,), (1,)]
    setup.loader = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=torch.arange(4).reshape(2, 2))
    assert [one.indices for (one,) in draw_steps(setup, iter(setup.loader)).values()] == [(0, 1), (2, 3)]


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 0:
            raise KeyError(index)
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_does_not_shift_the_indices(workers):
    """The batch after the one that could not be read has its own indices."""
    setup = make_setup()
    setup.loader = DataLoader(Broken(), batch_size=1, num_workers=workers)
    with Ledger(setup) as ledger:
        batches = iter(setup.loader)
        with pytest.raises(KeyError):
            next(batches)
        next(batches)
    assert ledger.drawn == {-1: (Drawn("setup.loader", content_digest(torch.tensor([1])), (1,)),)}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13
@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_data_loader(workers):
    """torchdata's loader resumes under the ledger as without; the batches that it passes over reach nobody."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    setup = make_setup()
    setup.loader = loader(stateful, num_workers=workers, snapshot_every_n_steps=4)
    batches = iter(setup.loader)
    for _ in range(2):
        next(batches)
    saved = setup.loader.state_dict()
    setup.loader.load_state_dict(saved)
    with Ledger(setup) as ledger:
        ledger.begin_step(2)
        for _ in setup.loader:
            pass
    assert ledger.drawn == {2: (drawn(4, 5), drawn(6, 7))}
    assert not hasattr(vars(stateful)["_get_iterator"], "__wrapped__")
    assert _draws._patched == []
