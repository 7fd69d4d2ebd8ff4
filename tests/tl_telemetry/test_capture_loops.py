"""Ten kinds of loop go on bitwise as they would have, after their state was put back into a setup of another seed."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from tl_core import TrainingSetup, seed_everything
from tl_telemetry import RunTrace, capture_state, compare_captures, first_divergence, put_back

STEPS, SAVED = 8, 4


def regression(setup, inputs):
    return nn.functional.mse_loss(setup.model(inputs), inputs.sum(1, keepdim=True))


def batch(index, generator=None):
    seeded = torch.Generator().manual_seed(index) if generator is None else generator
    return torch.randn(4, 3, generator=seeded)


def update(setup, loss):
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def network(*extra):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), *extra, nn.Linear(4, 1))


def plain(optimizer_of, **extra):
    def make():
        model = network()
        return TrainingSetup(model, optimizer_of(model.parameters()))

    return make, lambda setup, index: update(setup, regression(setup, batch(index)))


def lbfgs():
    def make():
        model = nn.Linear(3, 1)
        return TrainingSetup(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=12))

    def step(setup, index):
        def closure():
            setup.optimizer.zero_grad()
            loss = regression(setup, batch(index))
            loss.backward()
            return loss

        return setup.optimizer.step(closure).detach()

    return make, step


class Decay:
    """A callable object for LambdaLR, with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch + self.calls)


def schedulers():
    def make():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, 5)
        sequence = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
        other = torch.optim.Adam(model[0].parameters(), lr=0.01)
        plateau = lr_scheduler.ReduceLROnPlateau(other, patience=0)
        return TrainingSetup(
            model,
            {"sgd": optimizer, "adam": other},
            {"sequence": sequence, "plateau": plateau, "lambda": lr_scheduler.LambdaLR(other, Decay())},
        )

    def step(setup, index):
        loss = regression(setup, batch(index))
        setup.model.zero_grad()
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        setup.schedulers["sequence"].step()
        setup.schedulers["lambda"].step()
        setup.schedulers["plateau"].step(loss.detach())
        return loss.detach()

    return make, step


class Average:
    """The person's own EMA, which corrects its bias by the number of its updates, and refers to the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_updates = model, 0
        self.shadow = copy.deepcopy(model.state_dict())
        self.best, self.history = model.state_dict(), []

    def update(self, loss: torch.Tensor) -> float:
        self.num_updates += 1
        decay = min(0.9, self.num_updates / (5 + self.num_updates))
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, 1 - decay)
        self.history.append(float(loss))
        if self.history[-1] <= min(self.history):
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        return float(self.shadow["0.weight"].norm() + self.best["0.weight"].norm())


def averages():
    def make():
        model = network()
        state = {"ema": Average(model), "swa": AveragedModel(model)}
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.05), state=state)

    def step(setup, index):
        loss = update(setup, regression(setup, batch(index)))
        setup.state["swa"].update_parameters(setup.model)
        return {"loss": loss, "ema": setup.state["ema"].update(loss)}

    return make, step


def generators():
    def make():
        model = network()
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.noise = torch.Generator().manual_seed(torch.initial_seed())
        setup.draws = {
            "python": random.Random(random.random()),
            "numpy": numpy.random.default_rng(random.getrandbits(9)),
        }
        return setup

    def step(setup, index):
        scale = setup.draws["python"].gauss(1, 0.1) + setup.draws["numpy"].normal()
        return update(setup, regression(setup, batch(index, setup.noise) * scale))

    return make, step


def data_iterator():
    data = [batch(index) for index in range(3)]

    def make():
        model = network()
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.batches = enumerate(itertools.cycle(data))
        return setup

    def step(setup, index):
        number, inputs = next(setup.batches)
        return update(setup, regression(setup, inputs * (number + 1) / 4))

    return make, step


def global_noise():
    def make():
        model = network(nn.Dropout(0.5))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup, index):
        scale = numpy.random.randn() + random.gauss(1, 0.1)  # both keep the second number of a pair
        return update(setup, regression(setup, torch.randn(4, 3) * scale))

    return make, step


def accumulation():
    def make():
        model = network()
        setup = TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.05))
        setup.pending = 0
        return setup

    def step(setup, index):
        loss = regression(setup, batch(index)) / 3
        loss.backward()
        setup.pending += 1
        if setup.pending == 3:
            setup.optimizer.step()
            setup.optimizer.zero_grad(set_to_none=index % 2 == 0)
            setup.pending = 0
        return loss.detach()

    return make, step


class Lookahead(torch.optim.SGD):
    """The person's own optimizer, with slow weights, a counter, and state that belongs to no parameter."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.num_calls = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        super().step(closure)
        self.num_calls += 1
        self.state["calls"] = {"count": self.num_calls, "last": None}
        if self.num_calls % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


def scaled():
    def make():
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), scaler=scaler)

    def step(setup, index):
        loss = regression(setup, batch(index))
        setup.optimizer.zero_grad()
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return {"loss": loss.detach(), "scale": setup.scaler.get_scale()}

    return make, step


LOOPS = {
    "Adam": plain(lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True)),
    "SGD with momentum": plain(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
    "learning rate tensor": plain(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05))),
    "own optimizer": plain(Lookahead),
    "LBFGS": lbfgs(),
    "schedulers": schedulers(),
    "averages": averages(),
    "generators": generators(),
    "data iterator": data_iterator(),
    "global noise": global_noise(),
    "accumulation": accumulation(),
    "scaler": scaled(),
}


def run(setup, step, start, stop):
    trace = RunTrace()
    for index in range(start, stop):
        trace.add(index, step(setup, index), setup)
    return trace


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_goes_on_after_all_was_put_back(name):
    """All pieces in a fresh setup let its run go on bitwise the same; in a second one, and in the first, too."""
    make, step = LOOPS[name]
    seed_everything(1)
    first = make()
    run(first, step, 0, SAVED)
    saved = capture_state(first)
    rest = run(first, step, SAVED, STEPS)
    end = capture_state(first)
    assert compare_captures(saved, end) != []
    seed_everything(2)
    for setup in (make(), make(), first):
        run(setup, step, 0, 1)
        assert compare_captures(saved, capture_state(setup)) != []
        put_back(saved, setup, saved.pieces)
        assert compare_captures(saved, capture_state(setup)) == []
        again = run(setup, step, SAVED, STEPS)
        assert first_divergence(rest, again, rtol=0.0, atol=0.0) is None
        assert compare_captures(end, capture_state(setup)) == []


@pytest.mark.parametrize("name", LOOPS)
def test_capturing_changes_nothing(name):
    """A capture leaves values, versions of tensors, random streams and iterators alone: the run goes on the same."""
    make, step = LOOPS[name]
    traces, versions = [], []
    for capturing in (False, True):
        seed_everything(3)
        setup = make()
        trace = RunTrace()
        for index in range(STEPS):
            if capturing:
                before = [tensor._version for tensor in setup.model.state_dict().values()]
                capture = capture_state(setup)
                assert compare_captures(capture, capture) == []
                assert [tensor._version for tensor in setup.model.state_dict().values()] == before
            trace.add(index, step(setup, index), setup)
        traces.append(trace)
        versions.append([tensor._version for tensor in setup.model.state_dict().values()])
    assert first_divergence(*traces, rtol=0.0, atol=0.0) is None
    assert versions[0] == versions[1]


@pytest.mark.parametrize("name", LOOPS)
def test_a_capture_keeps_no_setup_alive(name):
    """A setup that nobody else refers to is gone, while its capture can still be put back."""
    make, step = LOOPS[name]
    setup = make()
    run(setup, step, 0, 2)
    capture = capture_state(setup)
    gone = [weakref.ref(setup), weakref.ref(setup.model), *(weakref.ref(o) for o in setup.optimizers.values())]
    del setup
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    fresh = make()
    put_back(capture, fresh, capture.pieces)
    assert compare_captures(capture, capture_state(fresh)) == []


def test_each_piece_alone_leaves_the_others():
    """Of all the pieces of a loop, one that is put back makes only its own differences go away."""
    seen = set()
    for make, step in LOOPS.values():
        seed_everything(4)
        setup = make()
        run(setup, step, 0, SAVED)
        saved = capture_state(setup)
        run(setup, step, SAVED, STEPS)
        differing = {difference.piece for difference in compare_captures(saved, capture_state(setup))}
        for piece in sorted(differing):
            put_back(saved, setup, [piece])
            left = {difference.piece for difference in compare_captures(saved, capture_state(setup))}
            assert left == differing - {piece}
            differing = left
            seen.add(piece.kind)
    assert seen >= {"weights", "optimizer state", "param groups", "optimizer attributes", "scheduler", "scaler"}
    assert seen >= {"state", "attribute", "gradients", "rng"}
