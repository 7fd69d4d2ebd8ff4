from __future__ import annotations

import collections
import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tl_core import TrainingSetup
from tl_telemetry import observe

# Methods that wait for the device when it is not the CPU, and the operations behind others that do.
WAITING_METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__array__",
    "nonzero",
    "is_nonzero",
    "allclose",
    "equal",
)
WAITING_OPERATIONS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique", "_unique2")
# Parameters of this many elements are told from everything else a loop makes.
LARGE = 40 * 50


class Counting(TorchDispatchMode):
    """Counts operations that wait, and those that make or fill a tensor as large as a parameter."""

    def __init__(self):
        super().__init__()
        self.waits = collections.Counter()
        self.made = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        if name in WAITING_OPERATIONS:
            self.waits[name] += 1
        output = func(*args, **(kwargs or {}))
        if name in ("_foreach_copy_", "copy_", "clone", "_to_copy", "empty_like"):
            touched = args[0] if name.endswith("copy_") and name != "_to_copy" else output
            self.made[name] += sum(leaf.numel() >= LARGE for leaf in _pytree.tree_leaves(touched))
        return output


@contextlib.contextmanager
def counting(monkeypatch):
    """Count what waits for a device, by operation and by method, and copies of large tensors."""
    with monkeypatch.context() as patch, Counting() as counted:
        for name in WAITING_METHODS:
            original = getattr(torch.Tensor, name)

            def method(self, *args, _name=name, _original=original, **kwargs):
                counted.waits[f"Tensor.{_name}"] += 1
                return _original(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, method)
        original_equal = torch.equal

        def equal(*args):
            counted.waits["torch.equal"] += 1
            return original_equal(*args)

        patch.setattr(torch, "equal", equal)
        yield counted


def model_of(dtype=torch.float32):
    return nn.Sequential(nn.Linear(50, 40, dtype=dtype), nn.BatchNorm1d(40, dtype=dtype), nn.Linear(40, 1, dtype=dtype))


def step(setup, look=None):
    parameters = list(setup.model.parameters())
    setup.optimizer.zero_grad(set_to_none=False)
    x = torch.ones(3, 50, dtype=parameters[0].dtype) * torch.arange(3, dtype=parameters[0].dtype).unsqueeze(1)
    loss = setup.model(x).pow(2).mean()
    scaler = setup.scaler or torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss).backward()
    scaler.unscale_(setup.optimizer)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler.step(setup.optimizer)
    scaler.update()
    for name in setup.schedulers:
        setup.schedulers[name].step()
    if look is not None:
        look(loss)
    return loss


def adam():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    return TrainingSetup(model, optimizer, scheduler, state={"ema": average})


def tensor_rate():
    model = model_of()
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9))


def low_precision():
    model = model_of(torch.bfloat16)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def scaled():
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)


def fused():
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True), scaler=scaler)


SETUPS = [adam, tensor_rate, low_precision, scaled, fused]


def counted_run(make_setup, monkeypatch, watch, look=None, steps=6):
    """Train, and count from the first step until the observer is left; the figures are looked at afterwards."""
    torch.manual_seed(0)
    setup = make_setup()
    with contextlib.ExitStack() as watched:
        run = watched.enter_context(watch(setup))
        with counting(monkeypatch) as counted:
            for _ in range(steps):
                if run is None:
                    step(setup, look)
                else:
                    with run.step(torch.ones(3, 50)) as current:
                        current.loss = step(setup, look)
            watched.close()
    if run is not None:
        assert len(run.rows()) == steps
    return counted


def unwatched(setup):
    return contextlib.nullcontext()


def without_updates(setup):
    return observe(setup, track_updates=False)


@pytest.mark.parametrize("watch", [observe, without_updates])
@pytest.mark.parametrize("make_setup", SETUPS)
def test_nothing_waits_between_the_first_step_and_the_first_look(make_setup, watch, monkeypatch):
    """A watched loop reads no figure on the host that the unwatched one does not read, closing of the run included."""
    alone = counted_run(make_setup, monkeypatch, unwatched)
    watched = counted_run(make_setup, monkeypatch, watch)
    assert watched.waits == alone.waits


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda loss: loss.item(), {"Tensor.item": 6, "_local_scalar_dense": 6}),
        (lambda loss: float(loss.detach()), {"Tensor.__float__": 6, "_local_scalar_dense": 6}),
        (lambda loss: bool(loss > 0), {"Tensor.__bool__": 6, "_local_scalar_dense": 6}),
        (lambda loss: loss.tolist(), {"Tensor.tolist": 6}),
        (lambda loss: torch.equal(loss, loss), {"torch.equal": 6, "equal": 6}),
    ],
)
def test_the_guard_against_waiting_goes_off(look, seen, monkeypatch):
    """A look at the loss in every step is counted, whatever its form."""
    quiet = counted_run(tensor_rate, monkeypatch, unwatched).waits
    counted = counted_run(tensor_rate, monkeypatch, unwatched, look).waits
    assert {name: count for name, count in (counted - quiet).items() if name in seen} == seen


def test_a_look_at_a_record_is_what_waits(monkeypatch):
    """Reading a figure of a record is the first thing that is counted."""
    setup = tensor_rate()
    with observe(setup) as run:
        with run.step() as current:
            current.loss = step(setup)
        with counting(monkeypatch) as counted:
            record = run.records[0]
            assert counted.waits == {}
            assert record.loss >= 0.0
    assert counted.waits["Tensor.tolist"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("watch", [observe, without_updates])
def test_nothing_waits_on_a_cuda_device(watch):
    """CUDA itself raises at anything that waits for the device."""
    model = model_of().cuda()
    setup = TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    x = torch.randn(3, 50, device="cuda")

    def train():
        setup.optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        setup.optimizer.step()
        return loss

    train()
    before = torch.cuda.get_sync_debug_mode()
    with watch(setup) as run:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):  # more than a block of figures
                with run.step() as current:
                    current.loss = train()
            with pytest.raises(RuntimeError, match="synchroniz"):
                x.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert len(run.losses) == 100


# -- memory ------------------------------------------------------------------------------------------------------------


def test_without_update_tracking_no_parameter_is_copied(monkeypatch):
    """track_updates=False makes and fills not one tensor of a parameter's size."""
    alone = counted_run(tensor_rate, monkeypatch, unwatched)
    watched = counted_run(tensor_rate, monkeypatch, without_updates)
    assert watched.made == alone.made


def test_update_tracking_copies_each_parameter_once_a_step(monkeypatch):
    """With updates, one copy of the parameters is made, and filled once a step."""
    alone = counted_run(tensor_rate, monkeypatch, unwatched)
    watched = counted_run(tensor_rate, monkeypatch, observe)
    assert watched.made - alone.made == {"empty_like": 1, "_foreach_copy_": 6}


@pytest.mark.parametrize(("watch", "copies"), [(unwatched, 0), (without_updates, 0), (observe, 1)])
def test_the_memory_that_watching_takes(watch, copies):
    """During a run at most one tensor of each parameter's size is alive beside the loop's own."""
    setup = tensor_rate()
    setup.optimizer.zero_grad()
    with watch(setup) as run:
        for _ in range(4):
            with contextlib.nullcontext() if run is None else run.step():
                step(setup)
        gc.collect()
        own = {setup.model[0].weight.data_ptr(), setup.model[0].weight.grad.data_ptr()}
        own |= {t.data_ptr() for s in setup.optimizer.state.values() for t in s.values()}
        alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.numel() >= LARGE]
        large = {t.data_ptr() for t in alive if t.shape == (40, 50)} - own
    assert len(large) == copies


def test_records_of_a_long_run_stay_small():
    """Records share what repeats from step to step: which parameters were concerned."""
    setup = tensor_rate()
    with observe(setup) as run:
        for _ in range(40):
            with run.step() as current:
                current.loss = step(setup)
    steps = [record.optimizer_step_events[0] for record in run.records]
    assert len({id(event.graded) for event in steps}) == 1
    assert len({id(event.portions[0].parameters) for event in steps}) == 1


def test_the_time_that_watching_takes_is_measured():
    """The run knows its own cost, and shows it in the summary."""
    setup = tensor_rate()
    with observe(setup) as run:
        for _ in range(4):
            with run.step() as current:
                current.loss = step(setup)
    assert 0.0 < run.watch_time_s < 5.0
    assert run.summary().splitlines()[-1] == f"watching took {1e3 * run.watch_time_s / 4:.2f} ms a step on the host"
