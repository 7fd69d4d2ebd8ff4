from __future__ import annotations

import contextlib
import random
import sys
import traceback
import warnings

import numpy
import pytest
import torch
import torch._dynamo  # imports sympy, which adds a warning filter of its own
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from tl_core import TrainingSetup
from tl_telemetry import observe, run_training

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


def make_setup():
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(setup, steps=1):
    for _ in range(steps):
        setup.optimizer.zero_grad()
        loss = setup.model(torch.ones(2, 3)).pow(2).mean()
        loss.backward()
        setup.optimizer.step()
    return loss


def moving_parts():
    """Return everything of torch and python that an observer touches, as identities."""
    cells = []
    for name in CLIPS:
        function = getattr(clip_grad, name)
        cells.append(function.__closure__[function.__code__.co_freevars.index("func")].cell_contents)
    hooks = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_parameter_registration_hooks,
        nn_module._global_module_registration_hooks,
    ]
    functions = [torch.autograd._engine_run_backward, warnings.showwarning, *cells]
    return [*functions, *(tuple(hook.values()) for hook in hooks), tuple(warnings.filters)]


@pytest.fixture(autouse=True)
def everything_is_put_back():
    """Fail any test of this file that leaves a hook or a patch behind."""
    before = moving_parts()
    yield
    assert moving_parts() == before


def test_hooks_and_patches_are_put_back():
    """Every moving part is replaced inside, and its own self again after leaving."""
    before = moving_parts()
    with observe(make_setup()):
        assert all(now != then for now, then in zip(moving_parts(), before, strict=True))
    assert moving_parts() == before


def test_a_loop_that_raises_leaves_nothing_behind():
    """An exception inside of the block, a backward pass or a step puts everything back too."""
    setup = make_setup()
    before = moving_parts()
    with pytest.raises(RuntimeError, match="does not require grad"), observe(setup), torch.no_grad():
        train(setup)
    with pytest.raises(KeyboardInterrupt), observe(setup):
        raise KeyboardInterrupt
    assert moving_parts() == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_observers_may_be_left_in_any_order(first_out):
    """Two observers of one loop both see it, and each stops seeing when it is left."""
    setup = make_setup()
    before = moving_parts()
    contexts = [observe(setup), observe(setup, track_updates=False)]
    runs = [context.__enter__() for context in contexts]
    train(setup)
    contexts[first_out].__exit__(None, None, None)
    assert moving_parts() != before
    train(setup)
    contexts[1 - first_out].__exit__(None, None, None)
    assert moving_parts() == before
    train(setup)
    assert len(runs[first_out].records) == 1
    assert len(runs[1 - first_out].records) == 2
    assert all(record.optimizer_steps == {"optimizer": 1} for run in runs for record in run.records)


def test_what_somebody_else_replaced_meanwhile_stays_theirs():
    """A function that was replaced during the run is left to whom replaced it; ours below it only passes calls on."""
    setup = make_setup()
    originals = torch.autograd._engine_run_backward, warnings.showwarning
    seen = []
    with observe(setup) as run:
        ours = torch.autograd._engine_run_backward, warnings.showwarning

        def engine(*args, **kwargs):
            seen.append("backward")
            return ours[0](*args, **kwargs)

        def showwarning(*args, **kwargs):
            seen.append("warning")

        torch.autograd._engine_run_backward, warnings.showwarning = engine, showwarning
        train(setup)
    try:
        assert (torch.autograd._engine_run_backward, warnings.showwarning) == (engine, showwarning)
        train(setup)
        assert seen == ["backward", "backward"]
        assert len(run.records) == 1
    finally:
        torch.autograd._engine_run_backward, warnings.showwarning = originals


def test_an_observer_that_was_never_needed_can_be_left():
    """A block in which nothing trains has no record."""
    with observe(make_setup()) as run:
        pass
    assert run.records == []
    assert run.losses == []


def broadcast(setup):
    return nn.functional.mse_loss(setup.model(torch.ones(2, 3)), torch.zeros(2))


def test_warnings_reach_who_waits_for_them():
    """pytest.warns and catch_warnings inside and outside of the observer get the warning, unchanged."""
    setup = make_setup()
    with pytest.warns(UserWarning, match="target size") as outside, observe(setup) as run, run.step():
        broadcast(setup)
    with observe(setup), warnings.catch_warnings(record=True) as inside:
        warnings.simplefilter("always")
        warnings.warn("something", RuntimeWarning, stacklevel=1)
    assert [(w.category, str(w.message)[:35]) for w in outside] == [
        (UserWarning, "Using a target size (torch.Size([2]")
    ]
    assert [(str(w.message), w.category, w.filename) for w in inside] == [("something", RuntimeWarning, __file__)]
    (event,) = run.records[0].events
    assert event.kind == "warning"
    assert event.category == "UserWarning"


def test_a_warning_filter_that_raises_still_raises():
    """With an "error" filter a warning is an exception, as it is without an observer."""
    setup = make_setup()
    with observe(setup), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="target size"):
            broadcast(setup)


def test_ignored_warnings_are_not_recorded():
    """What the person's filters ignore is not evidence either."""
    setup = make_setup()
    with observe(setup) as run, run.step(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broadcast(setup)
    assert run.records[0].events == ()


def files_in(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_the_observers_frames_are_cut_from_a_traceback():
    """An exception that passes through a watched backward pass shows the person's frames and torch's, and no other."""
    setup = make_setup()

    def explode(grad):
        raise ZeroDivisionError("in a hook")

    setup.model.weight.register_hook(explode)
    with pytest.raises(ZeroDivisionError) as alone:
        train(setup)
    with pytest.raises(ZeroDivisionError) as watched, observe(setup) as run, run.step():
        train(setup)
    assert files_in(watched.value) == files_in(alone.value)


def test_frames_of_a_run_are_cut_down_to_its_entry():
    """An exception from a step of run_training shows the call of run_training and then the step."""

    def step(setup, batch):
        raise ZeroDivisionError("in a step")

    with pytest.raises(ZeroDivisionError) as caught:
        run_training(make_setup, torch.ones(2), step, steps=2)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_frames_of_a_run_are_cut_down_to_its_entry", "run_training", "step"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("acts", "act"), [(0, "the start of the step"), (1, "backward"), (2, "clip"), (3, "optimizer step")]
)
def test_an_exception_gets_a_note_of_step_and_phase(acts, act):
    """The note says in which step, and after which observed act, the person's code raised."""

    def step(setup, batch):
        last = setup.step_index == 2
        for index, run in enumerate(
            (
                lambda: setup.model(batch).sum().backward(),
                lambda: nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0),
                setup.optimizer.step,
                setup.optimizer.zero_grad,
            )
        ):
            if last and index == acts:
                raise KeyError("mine")
            run()
        return 0.0

    with pytest.raises(KeyError, match="mine") as caught:
        run_training(make_setup, torch.ones(2, 3), step)
    assert caught.value.__notes__ == [
        f"raised in step 2 of the training run, after {act}; data was taken as one batch (a Tensor), used in every step"
    ]


def test_records_up_to_an_exception_are_kept():
    """A loop that raises half-way leaves the records of its steps, the broken one included, and can be judged."""
    setup = make_setup()

    def loop(run):
        for index in range(5):
            with run.step() as step:
                step.loss = train(setup)
                if index == 3:
                    raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"), observe(setup) as run:
        loop(run)
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [1, 1, 1, 1]
    assert run.assert_healthy() is run


def test_a_step_that_raised_and_was_caught_does_not_blind_the_observer():
    """A loop that catches an optimizer's exception and goes on is seen to go on."""

    class Flaky(torch.optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.calls += 1
            if self.calls == 2:
                raise MemoryError
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])

    setup = make_setup()
    setup.optimizer = Flaky(setup.model.parameters(), lr=0.1)
    with observe(setup) as run:
        for _ in range(4):
            with run.step() as step:
                try:
                    step.loss = train(setup)
                except MemoryError:
                    step.loss = 0.0
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [1, 0, 1, 1]


def streams():
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_leaves_the_random_streams_where_they_were(broken):
    """run_training seeds for itself, and puts python's, numpy's and torch's streams back, also when it raises."""

    def step(setup, batch):
        torch.rand(3), random.random(), numpy.random.rand()
        if broken:
            raise ZeroDivisionError
        return train(setup)

    before = streams()
    with pytest.raises(ZeroDivisionError) if broken else contextlib.nullcontext():
        run_training(make_setup, torch.ones(2, 3), step, steps=2)
    assert streams() == before


def test_the_seed_decides_the_run():
    """Two runs with one seed are the same bit for bit, and another seed makes another run."""

    def run(seed):
        return run_training(make_setup, torch.ones(2, 3), lambda setup, batch: train(setup), steps=3, seed=seed).losses

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_modes_inside_of_a_step_are_the_persons():
    """Grad mode, inference mode, autocast and default dtype are the same inside of a watched step and its hooks."""
    setup = make_setup()
    modes = []

    def look(*args):
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))

    setup.model.register_forward_hook(look)
    setup.model.weight.register_hook(look)
    setup.optimizer.register_step_pre_hook(look)
    setup.optimizer.register_step_post_hook(look)
    train(setup)
    with observe(setup) as run, run.step():
        look()
        train(setup)
        look()
    assert modes[5:-1] == modes[:4]
    assert modes[4] == modes[-1] == (True, False, False)
