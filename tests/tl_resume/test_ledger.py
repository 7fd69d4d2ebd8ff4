import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tl_core import TrainingSetup
from tl_resume._check._content import content_digest
from tl_resume._check._ledger import Drawn, Ledger


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


def test_a_tensor_inside_of_a_transformation_does_not_fail():
    """What cannot be read from where the hook runs counts by its kind."""
    setup = make_setup()
    with Ledger(setup) as ledger:
        ledger.begin_step(0)
        torch.func.vmap(setup.model)(torch.ones(3, 2, 2))
    assert [len(digests) for digests in ledger.inputs.values()] == [1]
