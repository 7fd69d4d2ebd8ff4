import copy
import gc
import io
import pickle
import sys
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint
from tl_resume._check import _draws
from tl_resume._check._content import content_digest
from tl_resume._check._ledger import Drawn, Ledger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tl_core import TrainingSetup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 3)
        self.heads = nn.ModuleList([nn.Linear(3, 1)])

    def forward(self, x, *, scale=1.0, fail=False):
        hidden = self.encoder(x) * scale
        if fail:
            raise ValueError("no")
        return self.heads[0](torch.relu(hidden))


def make_setup(**state):
    torch.manual_seed(0)
    net = Net()
    return TrainingSetup(net, torch.optim.SGD(net.parameters(), lr=0.1), state=state)


def batch(value):
    return torch.full((2, 2), float(value))


def inputs_digest(*args, **kwargs):
    return content_digest(args, kwargs)


def loader(cls=DataLoader, count=8, **options):
    return cls(TensorDataset(torch.arange(2.0 * count).reshape(count, 2)), batch_size=2, **options)


def samples(*indices):
    return [torch.stack([torch.tensor([2.0 * i, 2.0 * i + 1]) for i in indices])]


def drawn(*indices, name="setup.loader"):
    return Drawn(name, content_digest(samples(*indices)), indices)


def test_inputs_are_those_of_the_outermost_call():
    """The model's call counts once, its children's inside of it not; keywords count too."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        for step in range(2):
            ledger.begin_step(step)
            setup.model(batch(step), scale=2.0)
    assert ledger.inputs == {step: (inputs_digest(batch(step), scale=2.0),) for step in range(2)}
    assert ledger.drawn == {0: (), 1: ()}


def test_children_that_the_loop_calls_itself_count():
    """A child and a member of a list of children, called by the loop, are outermost."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        hidden = setup.model.encoder(batch(1))
        setup.model.heads[0](hidden)
    assert ledger.inputs == {0: (inputs_digest(batch(1)), inputs_digest(hidden))}


def test_modules_of_containers_state_and_attributes_count():
    """A ModuleDict has no call of its own; a critic in the state and a module set as an attribute count."""
    setup = make_setup(critic=nn.Linear(2, 1))
    setup.model = nn.ModuleDict({"a": Net(), "b": nn.ModuleList([Net()])})
    setup.extra = nn.Linear(2, 2)
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        for index, module in enumerate((setup.model["a"], setup.model["b"][0], setup.state["critic"], setup.extra)):
            module(batch(index))
    assert ledger.inputs == {0: tuple(inputs_digest(batch(index)) for index in range(4))}


def test_a_forward_that_raises_leaves_the_depth_right():
    """After an exception inside of a forward the next call is outermost again."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        with pytest.raises(ValueError, match="no"):
            setup.model(batch(1), fail=True)
        setup.model(batch(2))
    assert ledger.inputs == {0: (inputs_digest(batch(1), fail=True), inputs_digest(batch(2)))}


def test_a_model_that_is_replaced_is_watched_from_the_next_step():
    """The modules are looked up anew at each step; the old model is let go."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        old, setup.model = weakref.ref(setup.model), Net()
        setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
        ledger.begin_step(1)
        setup.model(batch(3))
        assert old() is None
    assert ledger.inputs == {0: (), 1: (inputs_digest(batch(3)),)}


def hooks_left(module):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return [name for part in module.modules() for name in kinds if getattr(part, name)]


def test_everything_is_put_back():
    """Hooks and patches are gone after success, an error and nested use left in the wrong order."""
    before = dict(vars(_BaseDataLoaderIter))
    setup = make_setup()
    with Ledger(setup):
        assert hooks_left(setup.model)
        assert dict(vars(_BaseDataLoaderIter)) != before
    assert (hooks_left(setup.model), dict(vars(_BaseDataLoaderIter))) == ([], before)

    with pytest.raises(ZeroDivisionError), Ledger(setup):
        1 / 0
    assert (hooks_left(setup.model), dict(vars(_BaseDataLoaderIter))) == ([], before)

    one, two = Ledger(setup), Ledger(setup)
    one.__enter__()
    two.__enter__()
    setup.loader = loader()
    first = next(iter(setup.loader))
    one.__exit__(None, None, None)
    setup.model(*first)
    next(iter(setup.loader))
    two.__exit__(None, None, None)
    assert (hooks_left(setup.model), dict(vars(_BaseDataLoaderIter))) == ([], before)
    assert (one.inputs, one.drawn) == ({}, {-1: (drawn(0, 1),)})
    assert (two.inputs, two.drawn) == ({-1: (inputs_digest(*first),)}, {-1: (drawn(0, 1), drawn(0, 1))})


def test_hooks_are_put_back_where_the_ledger_cannot_open(monkeypatch):
    """An error on the way in, after the first patch, leaves no hook and no patch."""
    setup = make_setup()
    monkeypatch.delattr(_BaseDataLoaderIter, "_next_index")
    before = dict(vars(_BaseDataLoaderIter))
    with pytest.raises(KeyError), Ledger(setup):
        pass
    assert (hooks_left(setup.model), dict(vars(_BaseDataLoaderIter))) == ([], before)


def test_a_patch_of_somebody_else_is_left(monkeypatch):
    """What was patched over ours stays, and ours does nothing below it."""
    setup = make_setup()
    setup.loader = loader()
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    with Ledger(setup) as ledger:
        ours = _BaseDataLoaderIter.__next__
        theirs = lambda self: ours(self)  # noqa: E731
        _BaseDataLoaderIter.__next__ = theirs
    assert _BaseDataLoaderIter.__next__ is theirs
    next(iter(setup.loader))
    assert ledger.drawn == {}


def test_a_ledger_makes_no_cycle():
    """What the setup holds is freed at once: workers that the garbage collector ends take 5 seconds each."""
    setup = make_setup()
    model = weakref.ref(setup.model)
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        setup.model(batch(1))
    gc.disable()
    try:
        del setup, ledger
        assert model() is None
    finally:
        gc.enable()


def train(watched):
    setup = make_setup(noise=nn.Dropout(0.5))
    setup.loader = loader(shuffle=True)
    ledger = Ledger(setup) if watched else None
    if ledger:
        ledger.__enter__()
    losses = []
    for step in range(3):
        if ledger:
            ledger.begin_step(step)
        for (x,) in setup.loader:
            loss = setup.model(setup.state["noise"](x)).square().mean()
            setup.optimizer.zero_grad()
            loss.backward()
            setup.optimizer.step()
            losses.append(loss.item())
    if ledger:
        ledger.__exit__(None, None, None)
    return losses, torch.get_rng_state().tolist()


def test_watching_changes_nothing():
    """Losses and the random stream are bitwise those of the unwatched run."""
    assert train(True) == train(False)


def test_copies_and_pickles_of_a_watched_model_work():
    """A model copied or saved as a whole inside of a step carries nothing of the ledger."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        copied = copy.deepcopy(setup.model)
        buffer = io.BytesIO()
        torch.save(setup.model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert torch.equal(copied(batch(1)), loaded(batch(1)))
        assert b"_check" not in pickle.dumps(setup.model)
    assert ledger.inputs == {0: ()}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(2, 2)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def test_recomputation_in_backward_is_no_input():
    """Activation checkpointing calls a child again in backward: that is no call of the loop."""
    setup = make_setup()
    setup.model = Checkpointed()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        setup.model(batch(1)).sum().backward()
    assert ledger.inputs == {0: (inputs_digest(batch(1)),)}


def test_another_thread_is_not_watched():
    """Forward calls and draws of other threads are not the loop's."""
    setup = make_setup()
    setup.loader = loader()

    def work():
        setup.model(next(iter(setup.loader))[0])

    with Ledger(setup) as ledger:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (ledger.inputs, ledger.drawn) == ({}, {})


@pytest.mark.parametrize("how", ["wrapped", "in place", "forward only"])
def test_compiled_models_are_seen_from_outside(how):
    """A compiled model's own inputs are seen, in a full graph, and put back afterwards."""
    torch._dynamo.reset()
    setup = make_setup()
    if how == "wrapped":
        setup.model = torch.compile(setup.model, backend="eager", fullgraph=True)
    elif how == "in place":
        setup.model.compile(backend="eager", fullgraph=True)
    else:
        setup.model.forward = torch.compile(setup.model.forward, backend="eager", fullgraph=True)
    call = setup.model._compiled_call_impl
    with Ledger(setup) as ledger:
        for step in range(2):
            ledger.begin_step(step)
            setup.model(batch(step)).sum().backward()
    assert ledger.inputs == {step: (inputs_digest(batch(step)),) for step in range(2)}
    assert setup.model._compiled_call_impl is call
    assert hooks_left(setup.model) == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_step_stays_one_graph(in_place):
    """Hooks that dynamo traces leave no trace: fullgraph holds, nothing is recorded."""
    torch._dynamo.reset()
    setup = make_setup()
    if in_place:
        setup.model.compile(backend="eager")
    step = torch.compile(lambda x: setup.model(x).sum(), backend="eager", fullgraph=True)
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        seen = step(batch(1))
    assert ledger.inputs == {0: ()}
    assert torch.equal(seen, step(batch(1)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_left_alone():
    """Scripted code takes no hooks and runs as before; a traced module is seen."""
    setup = make_setup()
    setup.model = torch.jit.script(nn.Linear(2, 1))
    setup.traced = torch.jit.trace(nn.Linear(2, 1), batch(1))
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        setup.model(batch(1))
        setup.traced(batch(2))
    assert ledger.inputs == {0: (inputs_digest(batch(2)),)}


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


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_digests_tell_contents_apart():
    """Dtype, shape, layout and bytes count, wherever they stand; equal contents have one digest."""
    numpy = pytest.importorskip("numpy")
    steps = torch.arange(6, dtype=torch.int32)

    class Sample:
        def __init__(self, x):
            self.x = x

    different = [
        steps,
        steps.float(),
        steps.reshape(2, 3),
        steps.reshape(2, 3).to_sparse(),
        steps.reshape(2, 3).float().to_sparse_csr(),
        steps.reshape(2, 3).float().to_sparse_csc(),
        torch.nested.nested_tensor([steps.float(), steps[:2].float()]),
        torch.nested.nested_tensor([steps.float(), steps[:2].float()], layout=torch.jagged),
        torch.quantize_per_tensor(steps.float(), 0.1, 0, torch.qint8),
        steps.bfloat16(),
        steps.to("meta"),
        torch.tensor(1j).conj(),
        torch.tensor(1j),
        torch.tensor(5),
        torch.empty(0),
        torch.empty(0, 2),
        steps.numpy(),
        numpy.float32(1.0),
        numpy.array([None, 1]),
        [1, 2],
        [[1], 2],
        (1, 2),
        {"a": 1},
        {"b": 1},
        {1, 2},
        "a",
        b"a",
        1,
        1.0,
        True,
        None,
        Sample(1),
        Sample(2),
    ]
    digests = [content_digest(value) for value in different]
    assert len(set(digests)) == len(different)
    assert digests == [content_digest(value) for value in different]
    assert content_digest(steps.reshape(2, 3).t()) == content_digest(steps.reshape(2, 3).t().contiguous())
    assert len(digests[0]) == 32
    nested, sample = [], Sample(1)
    nested.append(nested)
    sample.x = [sample] * 50
    assert len(content_digest(nested, sample)) == 32


def test_a_tensor_inside_of_a_transformation_does_not_fail():
    """What cannot be read from where the hook runs counts by its kind."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        torch.func.vmap(setup.model)(torch.ones(3, 2, 2))
    assert [len(digests) for digests in ledger.inputs.values()] == [1]


def test_numpy_is_not_needed(monkeypatch):
    """Digests and indices do without numpy."""
    expected = content_digest(samples(0, 1))
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert content_digest(samples(0, 1)) == expected
    assert _draws._as_indices([1, 2]) == (1, 2)
