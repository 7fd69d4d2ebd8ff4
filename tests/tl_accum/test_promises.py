"""The check changes nothing of the person's process, whatever happens, and says the same each time."""

from __future__ import annotations

import copy
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tl_accum import check_accumulation_equivalent
from tl_core import TrainingSetup, standard_step

PASSED = "Gradient accumulation: passed"
COUNTER = 0
HISTORY: list[float] = []


def data() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make_step(k: int) -> Any:
    return standard_step(loss_fn, accumulation_steps=k)


def undivided(k: int) -> Any:
    def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
        loss = loss_fn(setup.model, batch)
        loss.backward()
        if (setup.step_index + 1) % k == 0:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss

    return step


def streams() -> list[Any]:
    legacy = np.random.get_state()
    return [random.getstate(), legacy[0], legacy[1].tolist(), legacy[2], torch.get_rng_state().tolist()]


def draw() -> None:
    random.random()
    np.random.rand()
    torch.rand(1)


def drawing_step(k: int) -> Any:
    draw()
    step = make_step(k)

    def drawing(setup: TrainingSetup, batch: Tensor) -> Tensor:
        draw()
        return step(setup, batch)

    return drawing


def drawing_setup() -> Any:
    draw()
    return make_setup()


def drawing_data(cycle: int) -> Tensor:
    draw()
    return data()


def test_the_global_generators_are_put_back() -> None:
    """Whatever the person's code draws: the streams of python, numpy and torch are where they were."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = streams()
    assert check_accumulation_equivalent(drawing_setup, drawing_data, drawing_step).ok
    assert streams() == before
    draw()
    assert streams() != before  # so that the comparison can fail


def test_the_global_generators_are_put_back_after_an_error() -> None:
    """Also when the step raises."""
    before = streams()

    def broken(k: int) -> Any:
        draw()
        raise KeyError(k)

    with pytest.raises(KeyError):
        check_accumulation_equivalent(drawing_setup, drawing_data, broken)
    with pytest.raises(ZeroDivisionError):
        check_accumulation_equivalent(drawing_setup, drawing_data, loss_fn=lambda model, batch: 1 / 0)
    assert streams() == before


class Uncopied:
    """A batch of one's own class, which cannot be copied."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


@pytest.mark.parametrize(
    ("batch", "x_of", "split"),
    [
        (data(), lambda batch: batch, None),
        ({"nested": [data()], "name": "x"}, lambda batch: batch["nested"][0], None),
        ({"x": data().numpy()}, lambda batch: batch["x"], None),
    ],
    ids=["tensor", "containers", "array"],
)
def test_a_step_may_edit_its_batch_in_place(batch: Any, x_of: Callable[[Any], Any], split: Any) -> None:
    """Each call gets a copy: the batch that was given is as it was, and both runs see the same."""
    before = copy.deepcopy(batch)

    def editing(model: nn.Module, given: Any) -> Tensor:
        x = x_of(given)
        x *= 0.5
        if isinstance(given, dict):
            given["more"] = given.pop("name", None)
        return model(torch.as_tensor(x)).square().mean()

    assert str(check_accumulation_equivalent(make_setup, batch, loss_fn=editing)) == PASSED
    assert (np.asarray(x_of(batch)) == np.asarray(x_of(before))).all()
    if isinstance(batch, dict):
        assert list(batch) == list(before)


def test_a_batch_that_needs_gradients_stays_without_them() -> None:
    """Gradients of the inputs go to the copies."""
    batch = data().requires_grad_()

    def with_penalty(model: nn.Module, given: Tensor) -> Tensor:
        assert given.is_leaf
        assert given.requires_grad
        return model(given).square().mean()

    assert str(check_accumulation_equivalent(make_setup, batch, loss_fn=with_penalty)) == PASSED
    assert batch.grad is None


def test_a_batch_that_cannot_be_copied_is_handed_over_as_it_is() -> None:
    """A class of one's own that refuses to be copied, cut by a split of one's own."""

    def split(batch: Uncopied, parts: int) -> list[Uncopied]:
        return [Uncopied(part) for part in batch.x.chunk(parts)]

    report = check_accumulation_equivalent(
        make_setup, [Uncopied(data())], loss_fn=lambda model, batch: loss_fn(model, batch.x), split=split
    )
    assert str(report) == PASSED


def test_what_lies_outside_of_the_setup_is_set_back() -> None:
    """Globals, closures and objects of one's own: each run begins as a new process would, and so does what follows."""
    global COUNTER
    COUNTER, HISTORY[:] = 3, [1.0]
    calls = {"made": 0}

    class Trainer:
        def __init__(self) -> None:
            self.seen = 0

        def make_step(self, k: int) -> Any:
            calls["made"] += 1

            def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
                global COUNTER
                COUNTER += 1
                self.seen += 1
                loss = loss_fn(setup.model, batch)
                (loss / k).backward()
                HISTORY.append(loss.item())
                if (self.seen) % k == 0:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
                return loss

            return step

    trainer = Trainer()
    assert str(check_accumulation_equivalent(make_setup, data(), trainer.make_step)) == PASSED
    assert (COUNTER, HISTORY, trainer.seen, calls) == (3, [1.0], 0, {"made": 0})
    with pytest.raises(ZeroDivisionError):
        check_accumulation_equivalent(lambda: (make_setup(), calls.update(made=9), 1 / 0), data(), trainer.make_step)
    assert (COUNTER, HISTORY, trainer.seen, calls) == (3, [1.0], 0, {"made": 0})


CONFIG = {"k": 1}


def test_a_step_that_reads_what_make_step_wrote_sees_its_own() -> None:
    """make_step may set a global of the person's: each run makes its step anew."""

    def configured(k: int) -> Any:
        CONFIG["k"] = k

        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            return make_step(CONFIG["k"])(setup, batch)

        return step

    assert str(check_accumulation_equivalent(make_setup, data(), configured)) == PASSED
    assert CONFIG == {"k": 1}


def test_what_a_make_step_did_before_it_raised_is_set_back() -> None:
    """Also in its first call, before anything ran."""

    def configured(k: int) -> Any:
        CONFIG["k"] = 99
        raise KeyError(k)

    with pytest.raises(KeyError):
        check_accumulation_equivalent(make_setup, data(), configured)
    assert CONFIG == {"k": 1}


def test_warnings_are_passed_on() -> None:
    """With the person's category, text and line."""

    def warning(model: nn.Module, batch: Tensor) -> Tensor:
        warnings.warn("the learning rate is low", FutureWarning, stacklevel=1)
        return loss_fn(model, batch)

    with pytest.warns(FutureWarning, match=r"^the learning rate is low$") as caught:
        check_accumulation_equivalent(make_setup, data(), loss_fn=warning)
    assert len(caught) == 10
    assert {warned.filename for warned in caught} == {__file__}


def fail(model: nn.Module, batch: Tensor) -> Tensor:
    raise RuntimeError("no loss today")


def test_an_error_within_torch_passes_without_the_switchs_frames() -> None:
    """Only torch's own frames follow the person's line."""
    with pytest.raises(RuntimeError) as caught:
        check_accumulation_equivalent(make_setup, torch.randn(8, 5), make_step)
    names = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not [name for name in names[names.index(__file__, 1) :] if "tl_accum/_" in name]


def test_an_errors_traceback_leads_from_the_call_to_the_persons_code() -> None:
    """Without the frames of what observes."""
    with pytest.raises(RuntimeError) as caught:
        check_accumulation_equivalent(make_setup, data(), make_step=lambda k: lambda setup, b: fail(setup.model, b))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "fail"
    assert not [frame.filename for frame in frames if "tl_telemetry" in frame.filename]
    assert caught.value.args == ("no loss today",)
    assert caught.value.__notes__ == ["raised in cycle 1 (step_index 0)", "raised in the run over full batches"]


def patched() -> Iterator[Any]:
    yield torch.autograd._engine_run_backward
    yield [
        getattr(nn.utils.clip_grad, name).__closure__[0].cell_contents
        for name in ("clip_grad_norm_", "clip_grad_value_")
    ]
    yield len(torch.overrides._get_current_function_mode_stack())
    yield dict(sys.modules[Optimizer.__module__]._global_optimizer_pre_hooks)
    yield dict(sys.modules[Optimizer.__module__]._global_optimizer_post_hooks)
    yield dict(nn.modules.module._global_forward_hooks)
    yield dict(nn.modules.module._global_forward_pre_hooks)
    yield dict(nn.modules.module._global_parameter_registration_hooks)
    yield warnings.showwarning
    yield torch.is_grad_enabled()
    yield torch.are_deterministic_algorithms_enabled()
    yield threading.active_count()


def test_nothing_stays_patched() -> None:
    """After a pass, a failure and an error; and each of these is seen while a check runs."""
    before = list(patched())
    inside: SimpleQueue[Any] = SimpleQueue()  # a list would be set back with what lies outside of the setup

    def looking(model: nn.Module, batch: Tensor) -> Tensor:
        inside.put(list(patched()))
        return loss_fn(model, batch)

    assert check_accumulation_equivalent(make_setup, data(), loss_fn=looking).ok
    assert not check_accumulation_equivalent(make_setup, data(), undivided).ok
    with pytest.raises(RuntimeError):
        check_accumulation_equivalent(make_setup, data(), loss_fn=fail)
    assert list(patched()) == before
    assert sum(a != b for a, b in zip(inside.get(), before, strict=True)) >= 5


def test_two_checks_of_one_loop_say_the_same() -> None:
    """Whatever was drawn in between."""
    first = str(check_accumulation_equivalent(make_setup, data(), undivided))
    draw()
    assert str(check_accumulation_equivalent(make_setup, data(), undivided)) == first
    assert "[loss-not-divided]" in first


def test_another_seed_is_used() -> None:
    """seed= seeds what make_setup draws."""

    def weight_of(**options: int) -> list[float]:
        seen: SimpleQueue[Any] = SimpleQueue()

        def looking(model: Any, batch: Tensor) -> Tensor:
            seen.put(model[0].weight.flatten().tolist())
            return loss_fn(model, batch)

        assert check_accumulation_equivalent(make_setup, data(), loss_fn=looking, **options).ok
        return seen.get()

    assert weight_of() == weight_of() == weight_of(seed=0)
    assert weight_of() != weight_of(seed=5)


def test_checks_run_in_threads() -> None:
    """Each says what it says alone: a right loop passes beside a wrong one."""
    alone = [str(check_accumulation_equivalent(make_setup, data(), step)) for step in (make_step, undivided)]
    said: dict[int, str] = {}

    def work(index: int) -> None:
        said[index] = str(check_accumulation_equivalent(make_setup, data(), (make_step, undivided)[index]))

    before = list(patched())
    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [said[0], said[1]] == alone
    assert list(patched()) == before
