from collections import deque
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import Outside, compare_captures, own_object, setup_functions

CACHE: dict[str, torch.Tensor] = {}
CALLS = 0


class Trainer:
    def __init__(self) -> None:
        self.seen: deque[int] = deque()

    def step(self, batch: torch.Tensor, memory: list[int] = []) -> int:  # noqa: B006 (what is set back)
        global CALLS
        CALLS += 1
        CACHE["last"] = batch * 2
        memory.append(CALLS)
        self.seen.append(CALLS)
        return twice(CALLS) + len(memory)


@lru_cache
def twice(number: int) -> int:
    return 2 * number


def test_every_run_begins_as_the_first_did() -> None:
    """Globals, defaults, own objects and caches hold again what they held when Outside was made."""
    trainer = Trainer()
    outside = Outside([trainer.step])
    before, held = outside.capture(), CACHE
    first = [trainer.step(torch.ones(2)) for _ in range(3)]
    assert [difference.piece.name for difference in compare_captures(before, outside.capture())] == [
        "step's own object (Trainer)",
        "CALLS",
        "CACHE",
        "Trainer.step.memory (default)",
    ]
    outside.reset()
    assert compare_captures(before, outside.capture()) == []
    assert (CALLS, CACHE, list(trainer.seen), twice.cache_info().currsize) == (0, {}, [], 0)
    assert CACHE is held
    assert [trainer.step(torch.ones(2)) for _ in range(3)] == first
    outside.reset()


def test_what_save_wrote_stays() -> None:
    """A checkpoint in memory outlives the run, while what lies beside it is set back."""
    outside = Outside([Trainer().step])
    before = outside.capture()
    CACHE["checkpoint"] = torch.ones(1)
    outside.saved(compare_captures(before, outside.capture()))
    CACHE["last"] = torch.zeros(1)
    outside.reset()
    assert list(CACHE) == ["checkpoint"]
    CACHE.clear()


def test_tensors_are_kept_as_the_caller_wants() -> None:
    """keep= is called with the tensors of every capture, the first included."""
    asked: list[int] = []

    def keep(tensor: torch.Tensor) -> tuple[Any, bytes]:
        asked.append(tensor.numel())
        content = tensor.clone()
        return (lambda: content), bytes(tensor.numel())

    weights = torch.ones(3)
    outside = Outside([lambda: weights], keep=keep)
    outside.capture()
    assert asked == [3, 3]
    weights.zero_()
    outside.reset()
    assert outside.values()["weights (closure of <lambda>)"].tolist() == [1.0] * 3


def test_a_place_without_a_value_is_left_out_and_can_be_set() -> None:
    """A variable that the loop makes is no value before, and is taken away again."""

    def step() -> None:
        nonlocal best
        best = 1.0

    best: float
    outside = Outside([step])
    assert outside.values() == {}
    step()
    assert outside.values() == {"best (closure of step)": 1.0}
    outside.reset()
    with pytest.raises(NameError):
        best


def test_places_can_be_read_and_written() -> None:
    """access() gives each place's get and set, for put_back."""
    count = [0]
    outside = Outside([lambda: count])
    get, put = outside.access()["count (closure of <lambda>)"]
    put([5])
    assert (get(), count) == ([5], [5])


def test_own_objects_are_told_by_their_place() -> None:
    """The name of an own object's place gives the function and the type; other names give nothing."""
    names = Outside([Trainer().step]).values()
    assert {name: own for name in names if (own := own_object(name))} == {
        "step's own object (Trainer)": ("step", "Trainer")
    }
    assert len(names) == 4


def test_functions_that_no_step_names() -> None:
    """Hooks of modules, optimizers and parameters, schedules and functions on the setup are listed."""

    def forward(module: nn.Module, inputs: Any, output: Any) -> None: ...
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None: ...
    def grad(gradient: torch.Tensor) -> None: ...
    def accumulated(parameter: torch.Tensor) -> None: ...
    def schedule(epoch: int) -> float:
        return 1.0

    def helper() -> None: ...

    model = nn.Linear(1, 1)
    setup = TrainingSetup(model, optimizer := torch.optim.SGD(model.parameters()))
    assert setup_functions(setup) == []
    model.register_forward_hook(forward)
    optimizer.register_step_post_hook(stepped)
    model.weight.register_hook(grad)
    model.weight.register_post_accumulate_grad_hook(accumulated)
    setup.schedulers["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    setup.helper, setup.number, setup.part = helper, 3, partial(helper)
    assert set(setup_functions(setup)) == {forward, stepped, grad, accumulated, schedule, helper}
