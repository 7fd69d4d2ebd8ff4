"""Further causes that the resume check names, each with the whole text of its first finding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tl_core import TrainingSetup
from tl_resume import check_resume_equivalent, load_training_state, save_training_state

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
SEEN = 0


def make_setup(**extra: Any) -> TrainingSetup:
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name, value in extra.items():
        setattr(setup, name, value)
    return setup


def train(setup: Any, batch: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    loss = weight * (setup.model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: Any, path: Path) -> None:
    torch.save(setup.model.state_dict(), path)


def load(setup: Any, path: Path) -> None:
    setup.model.load_state_dict(torch.load(path))


def first(step: Callable[..., Any] = train, make: Callable[[], Any] = make_setup, **changed: Any) -> str:
    """Return the whole text of the first finding; empty where there is none."""
    report = check_resume_equivalent(make, changed.pop("data", X), step, **{"save": save, "load": load, **changed})
    return str(report.findings[0]) if report.findings else ""


# -- loops, by the name of what is lost --------------------------------------------------------------------------


def numpy_generator() -> str:
    return first(lambda setup, batch: train(setup, batch, 1.0 + np.random.rand()))


def python_generator() -> str:
    return first(lambda setup, batch: train(setup, batch, 1.0 + random.random()))


def own_python_generator() -> str:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        return train(setup, batch, 1.0 + setup.dice.random())

    return first(step, lambda: make_setup(dice=random.Random(5)))


def buffer_that_state_dict_leaves_out() -> str:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1.0
            return self.linear(x) / self.count

    def make() -> TrainingSetup:
        model = Centered()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return first(make=make)


def optimizers_swapped() -> str:
    def make() -> TrainingSetup:
        model = nn.ModuleDict({"left": nn.Linear(4, 1), "right": nn.Linear(4, 1)})
        chosen = {name: torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for name, part in model.items()}
        return TrainingSetup(model, chosen)

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = (setup.model["left"](batch) - 1.0).square().mean() + setup.model["right"](batch).square().mean()
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    def save_both(setup: Any, path: Path) -> None:
        states = [optimizer.state_dict() for _, optimizer in sorted(setup.optimizers.items(), reverse=True)]
        torch.save({"model": setup.model.state_dict(), "optimizers": states}, path)

    def load_both(setup: Any, path: Path) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        for optimizer, held in zip(setup.optimizers.values(), state["optimizers"], strict=True):
            optimizer.load_state_dict(held)

    return first(step, make, save=save_both, load=load_both)


def loader_that_starts_again() -> str:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        if setup.iterator is None:
            setup.iterator = iter(setup.loader)
        return train(setup, next(setup.iterator)[0])

    def make() -> TrainingSetup:
        return make_setup(loader=DataLoader(TensorDataset(X), batch_size=2), iterator=None)

    return first(step, make, data=torch.zeros(1))


def one_batch_too_many() -> str:
    def load_and_skip(setup: Any, path: Path) -> None:
        load(setup, path)
        setup.rows = iter(X.split(2)[5:])

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        return train(setup, next(setup.rows))

    return first(step, lambda: make_setup(rows=iter(X.split(2))), load=load_and_skip, steps=6, resume_at=4)


def global_that_weighs() -> str:
    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        global SEEN
        SEEN += 1
        return train(setup, batch, 1.0 / SEEN)

    return first(step)


class Trainer:
    def __init__(self) -> None:
        self.seen = 0

    def step(self, setup: Any, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return train(setup, batch, 1.0 / self.seen)


def object_that_the_step_is_bound_to() -> str:
    return first(Trainer().step)


def save_that_draws() -> str:
    def drawing_save(setup: Any, path: Path) -> None:
        torch.rand(1)
        save_training_state(setup, path)

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        return train(setup, batch + 0.1 * torch.randn(4))

    return first(step, save=drawing_save, load=load_training_state)


def save_that_rounds() -> str:
    def rounding_save(setup: Any, path: Path) -> None:
        torch.save(setup.model.bfloat16().state_dict(), path)
        setup.model.float()

    return first(save=rounding_save)


def save_that_leaves_other_weights() -> str:
    def averaging_save(setup: Any, path: Path) -> None:
        with torch.no_grad():
            for parameter in setup.model.parameters():
                parameter.mul_(0.5)
        save(setup, path)

    return first(save=averaging_save)


def moments_in_half_precision() -> str:
    def rounding_save(setup: Any, path: Path) -> None:
        state = setup.optimizer.state_dict()
        state["state"] = {
            index: {name: value.bfloat16() for name, value in held.items()} for index, held in state["state"].items()
        }
        torch.save({"model": setup.model.state_dict(), "optimizer": state}, path)

    def load_both(setup: Any, path: Path) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.optimizer.load_state_dict(state["optimizer"])

    def make() -> TrainingSetup:
        model = nn.Linear(4, 1, bias=False)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.05))

    return first(make=make, save=rounding_save, load=load_both)


CAUSES: dict[Callable[[], str], str] = {
    numpy_generator: """\
[rng-not-restored] numpy's global generator is in another state after loading than when saved, and the loop draws \
from it; the runs part at step 4: loss 0.169782 resumed, 0.170577 without interruption; with it put back after \
loading, the resumed run is the uninterrupted one
  cause: its random numbers (dropout, augmentation, shuffling) are other ones after resuming
  fix: save and restore it with numpy.random.get_state() and numpy.random.set_state(), or use save_training_state()""",
    python_generator: """\
[rng-not-restored] python's global generator (random) is in another state after loading than when saved, and the \
loop draws from it; the runs part at step 4: loss 0.143836 resumed, 0.191628 without interruption; with it put back \
after loading, the resumed run is the uninterrupted one
  cause: its random numbers (dropout, augmentation, shuffling) are other ones after resuming
  fix: save and restore it with random.getstate() and random.setstate(), or use save_training_state()""",
    own_python_generator: """\
[generator-not-restored] the random generator setup.dice is in another state after loading than when saved, and the \
loop draws from it; the runs part at step 4: loss 0.127706 resumed, 0.136913 without interruption; with it put back \
after loading, the resumed run is the uninterrupted one
  cause: a generator of the loop's own is in no state_dict(): its state must be saved by hand
  fix: save the generator's state and set it again in load()""",
    buffer_that_state_dict_leaves_out: """\
[model-not-restored] count differs after loading (count 4 when saved, 0 after loading); the runs part at step 4: \
loss 1.50742 resumed, 4.46336 without interruption; with it put back after loading, the resumed run is the \
uninterrupted one
  cause: state_dict() leaves count out (persistent=False): the checkpoint lacks what training made of it
  fix: register the buffer with persistent=True, or save and restore it beside the state_dict()""",
    optimizers_swapped: """\
[optimizer-state-misplaced] the state of optimizer 'left' differs after loading: left.weight momentum_buffer: 4 of 4 \
elements, the most at [0, 2]: -2.37462 when saved, 3.10939 after loading; left.bias momentum_buffer -6.13908 when \
saved, 0.349431 after loading; the runs part at step 4: after it, left.weight has norm 0.57539 resumed, 0.537865 \
without interruption; with the state of optimizer 'left' and the state of optimizer 'right' put back after loading, \
the resumed run is the uninterrupted one
  cause: the loaded state is the one that optimizer 'right' had when saved
  fix: save and load the optimizers by name: {name: optimizer.state_dict() for name, optimizer in ...}""",
    loader_that_starts_again: """\
[data-position-not-restored] the position of setup.iterator was not restored: step 4 trained on the batch that step \
0 had without interruption: the data start again; sample indices 0-7 were repeated, sample indices 8-15 dropped; the \
runs part at step 4: loss 0.0725281 resumed, 1.69157 without interruption
  cause: the data start at another place after resuming than where the run had stopped
  fix: save how many batches were drawn (or the sampler's or the loader's own state: torchdata's StatefulDataLoader \
has one) and go on from there in load()""",
    one_batch_too_many: """\
[data-position-not-restored] the position of setup.rows was not restored (a tuple_iterator at item 4 of 8 when \
saved, a tuple_iterator at item 0 of 3 after loading): the inputs of step 4 were skipped: step 4 trained on the \
inputs that step 5 had without interruption; the runs part at step 4: loss 3.46581 resumed, 1.69157 without \
interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: the data start at another place after resuming than where the run had stopped
  fix: save how many batches were drawn (or the sampler's or the loader's own state: torchdata's StatefulDataLoader \
has one) and go on from there in load()""",
    global_that_weighs: """\
[outside-state-not-restored] SEEN 4 when saved, 0 after loading; the runs part at step 4: loss 1.82989 resumed, \
0.365977 without interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: training changes it, load() leaves it as it was built: it lies in a place outside of the setup, which \
no state_dict() covers
  fix: save SEEN in the checkpoint and set it in load(), or move it into the setup""",
    object_that_the_step_is_bound_to: """\
[outside-state-not-restored] Trainer.seen (the object that step is bound to) 4 when saved, 0 after loading; the runs \
part at step 4: loss 1.82989 resumed, 0.365977 without interruption; with it put back after loading, the resumed run \
is the uninterrupted one
  cause: training changes it, load() leaves it as it was built: it lies in a place outside of the setup, which \
no state_dict() covers
  fix: save Trainer.seen in the checkpoint and set it in load(), or move it into the setup""",
    save_that_draws: """\
[saving-changes-training] save() before step 4 changed the training state: torch's generator was drawn from, which \
the loop draws from too; the runs part at step 4: loss 0.508349 in the run that saves, 0.503571 without interruption
  cause: save() draws random numbers (an evaluation, a shuffled sample): the loop's next draws are other ones
  fix: put the generators back at the end of save() (tl_core.preserve_rng does), or do not draw in it""",
    save_that_rounds: """\
[saving-changes-training] save() before step 4 changed the training state: the values of weight, bias (weight: 4 of \
4 elements, the most at [0, 3]: 0.650708 before, 0.652344 after saving); the runs part at step 4: loss 0.528103 in \
the run that saves, 0.530833 without interruption
  cause: save() converts the live model to a lower precision: training goes on with the rounded weights
  fix: convert or average a copy: {name: tensor.to(...) for name, tensor in model.state_dict().items()}""",
    save_that_leaves_other_weights: """\
[saving-changes-training] save() before step 4 changed the training state: the values of weight, bias (weight: 4 of \
4 elements, the most at [0, 2]: 0.81629 before, 0.408145 after saving); the runs part at step 4: loss 2.26041 in the \
run that saves, 0.530833 without interruption
  cause: save() writes other values into the live model (an average, for export) and does not put them back
  fix: convert or average a copy: {name: tensor.to(...) for name, tensor in model.state_dict().items()}""",
    moments_in_half_precision: """\
[loaded-in-lower-precision] the state of optimizer 'optimizer' differs after loading: 2 tensors differ, weight \
exp_avg: 4 of 4 elements, the most at [0, 3]: -1.46577 when saved, -1.46875 after loading; weight step 4 (float32) \
when saved, 4 (bfloat16) after loading; the runs part at step 4: after it, weight has norm 0.606237 resumed, \
0.606255 without interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: the loaded values are the saved ones rounded to bfloat16: the checkpoint was written in bfloat16
  fix: save the training state in the precision that it has; write a smaller copy for inference beside it""",
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_the_cause_is_named_in_full(cause: Callable[[], str]) -> None:
    """The first finding says what was lost, what that did, and what to change."""
    assert cause() == CAUSES[cause]


def test_correct_loops_of_the_same_kinds_are_left_alone() -> None:
    """The training state carries all of these: generators, counters, iterators' rows by step, several optimizers."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.seen += 1
        noise = np.random.rand() + random.random() + setup.dice.random() + float(torch.rand(()))
        return train(setup, X.split(2)[setup.step_index], (1.0 + noise) / setup.seen)

    def make() -> TrainingSetup:
        return make_setup(seen=0, dice=random.Random(5))

    assert first(step, make, save=save_training_state, load=load_training_state) == ""
    assert first(step, make) != ""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 sets it when first used
def test_a_stateful_loader_that_is_not_restored_is_a_lost_position() -> None:
    """What lies inside of the loader is not listed: its position was lost, and its own state brings it back."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> TrainingSetup:
        return make_setup(loader=stateful.StatefulDataLoader(TensorDataset(X), batch_size=2), rows=None)

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        setup.rows = iter(setup.loader) if setup.rows is None else setup.rows
        return train(setup, next(setup.rows)[0])

    def save_both(setup: Any, path: Path) -> None:
        torch.save({"model": setup.model.state_dict(), "loader": setup.loader.state_dict()}, path)

    def load_both(setup: Any, path: Path) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.loader.load_state_dict(state["loader"])

    assert first(step, make, data=torch.zeros(1)).splitlines()[0] == (
        "[data-position-not-restored] the position of setup.loader was not restored: step 4 trained on the batch that "
        "step 0 had without interruption: the data start again; sample indices 0-7 were repeated, sample indices 8-15 "
        "dropped; the runs part at step 4: loss 0.0725281 resumed, 1.69157 without interruption; with it put back "
        "after loading, the resumed run is the uninterrupted one"
    )
    assert first(step, make, data=torch.zeros(1), save=save_both, load=load_both) == ""


class Average:
    """An average of the weights that begins with the first update."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] | None = None

    def update(self, model: nn.Module) -> None:
        now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        held = now if self.weights is None else self.weights
        self.weights = {name: 0.9 * held[name] + 0.1 * value for name, value in now.items()}


def test_an_average_of_all_weights_that_does_not_exist_yet_is_lost() -> None:
    """A dict of averages that a fresh setup begins without is a finding, although no loss depends on it."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        setup.average.update(setup.model)
        return loss

    def save_both(setup: Any, path: Path) -> None:
        torch.save({"model": setup.model.state_dict(), "average": setup.average.weights}, path)

    def load_both(setup: Any, path: Path) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.average.weights = state["average"]

    def make() -> TrainingSetup:
        return make_setup(average=Average())

    assert first(step, make) == (
        "[attribute-not-restored] setup.average.weights a dict of 2 items when saved, None after loading; still "
        "different at the end of the run\n"
        "  cause: training changes it, and the checkpoint does not carry it; there was no effect on the losses yet\n"
        "  fix: save setup.average.weights in the checkpoint and set it again in load()"
    )
    assert first(step, make, save=save_both, load=load_both) == ""


def test_an_average_of_some_weights_is_left_to_the_person() -> None:
    """What holds a tensor for one weight only, for a plot perhaps, is a note."""

    def step(setup: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = train(setup, batch)
        now = setup.model.bias.detach().clone()
        setup.shown = {"bias": now if setup.shown is None else 0.9 * setup.shown["bias"] + 0.1 * now}
        return loss

    report = check_resume_equivalent(lambda: make_setup(shown=None), X, step, save=save, load=load, resume_at=4)
    assert report.ok
    assert [note.rule for note in report.notes] == ["unsaved-attribute"]
