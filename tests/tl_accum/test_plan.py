"""Arguments: each misuse with its whole message; and the groups that are fed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tl_accum import check_accumulation_equivalent
from tl_accum._plan import MAX_IMPLIED_EPOCH, Plan, make_plan
from tl_core import TrainingSetup, standard_step

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch if isinstance(batch, Tensor) else batch[0]).square().mean()


def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
    return standard_step(loss_fn, accumulation_steps=k)


def step(setup: TrainingSetup, batch: Any) -> Tensor:
    return make_step(1)(setup, batch)


def error_of(**changed: Any) -> str:
    """Return the error, and its notes, that the check raises for a correct call with some arguments changed."""
    given = {"make_setup": make_setup, "data": X, "make_step": make_step, **changed}
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)) as caught:
        check_accumulation_equivalent(**given)
    return "\n".join([f"{caught.type.__name__}: {caught.value}", *getattr(caught.value, "__notes__", ())])


def test_the_call_is_correct_but_for_what_is_changed() -> None:
    """Without a mistake the call passes, so that each error below is about its own mistake."""
    report = check_accumulation_equivalent(make_setup, X, make_step)
    assert (str(report), report.cycles) == ("Gradient accumulation: passed", 2)
    assert check_accumulation_equivalent(make_setup, X, loss_fn=loss_fn).ok


EITHER = (
    "make_step(k) returns step(setup, batch) for k accumulation steps, loss_fn(model, batch) only computes the loss"
)
TAKES = "TypeError: make_step must take the number of accumulation steps and return step(setup, batch), got "
WRITE = ": write make_step=lambda k: ..."

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"make_step": None}, f"TypeError: pass either make_step or loss_fn, got neither: {EITHER}"),
    ({"loss_fn": loss_fn}, f"TypeError: pass either make_step or loss_fn, got both: {EITHER}"),
    ({"make_step": None, "loss_fn": 3}, "TypeError: loss_fn must be a function, got int"),
    ({"make_step": 3}, "TypeError: make_step must be a function of the accumulation steps, got int"),
    (
        {"make_step": step},
        f"{TAKES}step(setup: 'TrainingSetup', batch: 'Any') -> 'Tensor'{WRITE}",
    ),
    ({"make_step": lambda: step}, f"{TAKES}<lambda>(){WRITE}"),
    (
        {"make_step": lambda k: None},
        "TypeError: make_step(1) must return a function step(setup, batch), got a NoneType",
    ),
    ({"make_step": lambda k: 1 / 0}, "ZeroDivisionError: division by zero\nraised in make_step(1)"),
    ({"accumulation_steps": 1}, "ValueError: accumulation_steps must be at least 2, got 1"),
    ({"accumulation_steps": True}, "TypeError: accumulation_steps must be an int, got bool True"),
    ({"accumulation_steps": 4.0}, "TypeError: accumulation_steps must be an int, got float 4.0"),
    ({"cycles": 0}, "ValueError: cycles must be at least 1, got 0"),
    ({"cycles": "2"}, "TypeError: cycles must be an int, got str '2'"),
    ({"epoch_length": 0}, "ValueError: epoch_length must be at least 1, got 0"),
    ({"epoch_length": False}, "TypeError: epoch_length must be an int, got bool False"),
    ({"split": 3}, "TypeError: split must be a function split(batch, parts), got int"),
    (
        {"allow": "loss-not-divided"},
        "TypeError: allow must be a list of rule ids, got 'loss-not-divided': write ['loss-not-divided']",
    ),
    (
        {"allow": ["loss-not-halved"]},
        "ValueError: allow names the rule 'loss-not-halved', which does not exist; did you mean loss-not-divided?",
    ),
    ({"seed": -1}, "ValueError: seed must be from 0 to 2**32 - 1, got -1"),
    ({"rtol": -1.0}, "ValueError: tolerance 'grad_accumulation': rtol must be finite and >= 0, got -1.0"),
    ({"atol": "x"}, "TypeError: tolerance 'grad_accumulation': atol must be a number, got str 'x'"),
]


@pytest.mark.parametrize(("changed", "message"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_an_argument_that_is_not_allowed_is_named(changed: dict[str, Any], message: str) -> None:
    """The argument, what was got, and what is allowed."""
    assert error_of(**changed) == message


LOSS_IS = "return the loss: a real tensor with one element, a number, or a dict of named ones"
FIRST = "\nraised in cycle 1 (step_index 0)\nraised in the run over full batches"
LOSSES: list[tuple[Any, str]] = [
    (None, "TypeError: step() returned None at step 0; "),
    ("x", "TypeError: step() returned a str 'x' at step 0; "),
    (torch.ones(2), "ValueError: step() returned a tensor of shape (2,) at step 0; "),
    ({}, "ValueError: step() returned an empty dict at step 0; "),
]


@pytest.mark.parametrize(("loss", "message"), LOSSES, ids=[message[11:40] for _, message in LOSSES])
def test_a_loss_that_is_none_is_named_with_its_place(loss: Any, message: str) -> None:
    """The error's notes say in which cycle of which run it was returned."""

    def other(k: int) -> Any:
        def returning(setup: TrainingSetup, batch: Tensor) -> Any:
            make_step(k)(setup, batch)
            return loss

        return returning

    assert error_of(make_step=other) == message + LOSS_IS + FIRST


def test_a_loss_function_that_detaches_is_named() -> None:
    """loss_fn must return what gradients come from."""
    assert error_of(make_step=None, loss_fn=lambda model, batch: 1.0) == (
        "ValueError: the loss that loss_fn() returned at step 0 is a float: return the tensor that the model's output "
        "was turned into, without detach() or item()" + FIRST
    )


def test_an_error_in_a_micro_batch_passes_with_its_place() -> None:
    """Exceptions of the person's code pass through; notes say where they came from."""

    def other(k: int) -> Any:
        def failing(setup: TrainingSetup, batch: Tensor) -> Any:
            if k > 1 and setup.step_index == 6:
                raise ZeroDivisionError("no more")
            return make_step(k)(setup, batch)

        return failing

    assert error_of(make_step=other) == (
        "ZeroDivisionError: no more\nraised in cycle 2, micro-batch 3 of 4 (step_index 6)\n"
        "raised in the run over micro-batches"
    )


SAME = (
    "ValueError: make_setup() returned the same model as an earlier call: every run needs a fresh setup, so build the "
    "model and the optimizers inside make_setup()"
)


def test_a_setup_that_is_not_fresh_is_an_error() -> None:
    """The same model again, from a closure, a global or an object."""
    built = make_setup()

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = make_setup()

        def build(self) -> Any:
            return self.model, self.optimizer

    assert error_of(make_setup=lambda: built) == SAME
    assert error_of(make_setup=Trainer().build) == SAME


def test_a_setup_that_a_cache_returns_is_fresh() -> None:
    """A cache of the person's is empty in a new process: it is cleared between the runs."""
    assert check_accumulation_equivalent(functools.lru_cache(make_setup), X, make_step).ok


def test_other_weights_in_the_second_call_are_an_error() -> None:
    """Random numbers that no seed reaches make two runs that cannot be compared."""

    def build() -> Any:
        model, optimizer = make_setup()
        nn.init.constant_(model.weight, float.fromhex(os.urandom(4).hex()))
        return model, optimizer

    assert error_of(make_setup=build) == (
        "ValueError: make_setup() built another setup in its second call, under the same seed: weights.weight: 3 of 3 "
        "elements. Build it anew each time, with random numbers from the global generators of torch, numpy or python, "
        "which are seeded before each call"
    )


def test_a_step_for_one_accumulation_step_that_never_updates_is_an_error() -> None:
    """make_step that ignores its argument gives nothing to compare with."""
    assert error_of(make_step=lambda k: make_step(4)) == (
        "ValueError: make_step(1) must return a step that updates in every call: it made no update in 2 calls, while "
        "make_step(4)'s made 2 in 8. make_step ignores its argument, or reads the accumulation steps from somewhere "
        "else"
    )


DATA_IS = (
    "data must be one batch, a list of batches, an iterable of batches such as a DataLoader, or a function from the "
    "step index to a batch"
)
NEEDED = "\n2 full batches are needed, one a step of the data: cycles=2"
CUT = "split_batch(batch, 4)"
UNEVEN = "micro-batches of equal size: use a batch size that 4 divides, or pass split="


def refused_data() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"data": None}, f"TypeError: {DATA_IS}; got None"
    yield {"data": []}, f"ValueError: data is an empty list; {DATA_IS}"
    yield (
        {"data": TensorDataset(X)},
        "TypeError: data is a dataset (TensorDataset), whose items are not batches: wrap it in a DataLoader, "
        "DataLoader(data, batch_size=...), or with batch_size=None if it makes batches itself",
    )
    yield (
        {"data": iter([X])},
        "ValueError: data is a one-shot iterator (list_iterator) that gave 1 batch, but steps=2 needs 2: pass more "
        f"batches, a list, or a loader that can be iterated again\nraised by data at step 1{NEEDED}",
    )
    yield {"data": lambda cycle: 1 / 0}, f"ZeroDivisionError: division by zero\nraised by data at step 0{NEEDED}"
    yield (
        {"data": X[:6]},
        f"ValueError: a batch of 6 examples cannot be split into 4 {UNEVEN}\nraised in {CUT} for batch 0",
    )
    yield (
        {"data": [X, X[:2]]},
        f"ValueError: a batch of 2 examples cannot be split into 4 {UNEVEN}\nraised in {CUT} for batch 1",
    )
    yield (
        {"split": lambda batch, parts: [batch] * 3},
        "ValueError: split(batch, 4) must return 4 micro-batches, got 3",
    )
    yield (
        {"split": lambda batch, parts: batch},
        "TypeError: split(batch, 4) must return a list of 4 micro-batches, got Tensor",
    )
    yield (
        {"split": lambda batch, parts: iter(batch.chunk(parts))},
        "TypeError: split(batch, 4) must return a list of 4 micro-batches, got tuple_iterator",
    )
    yield (
        {"split": lambda batch, parts: 1 / 0},
        "ZeroDivisionError: division by zero\nraised in split(batch, 4) for batch 0",
    )


@pytest.mark.parametrize(("changed", "message"), list(refused_data()), ids=range(11))
def test_data_that_cannot_be_fed_is_named(changed: dict[str, Any], message: str) -> None:
    """What was given, which batch, and what is allowed."""
    assert error_of(**changed) == message


def test_a_given_split_makes_the_micro_batches() -> None:
    """split= is called with the batch and the number of parts, and its parts are what the step gets."""
    calls = []

    def by_columns(batch: Tensor, parts: int) -> tuple[Tensor, ...]:
        calls.append((tuple(batch.shape), parts))
        return batch.t().chunk(parts)

    report = check_accumulation_equivalent(
        make_setup,
        torch.randn(3, 8),
        lambda k: standard_step(lambda model, b: loss_fn(model, b if k > 1 else b.t()), accumulation_steps=k),
        split=by_columns,
    )
    assert report.ok
    assert calls == [((3, 8), 4), ((3, 8), 4)]


def plan_of(data: Any, **changed: Any) -> Plan:
    given: dict[str, Any] = {
        "accumulation_steps": 4,
        "cycles": 2,
        "epoch_length": None,
        "split": None,
        "disable_dropout": True,
        "device": "cpu",
        "seed": 0,
        **changed,
    }
    return make_plan(make_setup, data, make_step, **given)


def sizes(plan: Plan) -> list[str]:
    """Return each group's size; ``-`` marks an incomplete one, ``|`` the end of an epoch."""
    return [f"{len(g.parts)}{'-' if g.incomplete else ''}{'|' if g.ends_epoch else ''}" for g in plan.groups]


@pytest.mark.parametrize(
    ("epoch_length", "cycles", "expected"),
    [
        (None, 2, ["4", "4"]),
        (8, 2, ["4", "4|"]),
        (8, 5, ["4", "4|", "4", "4|", "4"]),
        (10, 2, ["4", "4", "2-|", "4"]),
        (10, 5, ["4", "4", "2-|", "4", "4"]),
        (3, 1, ["3-|", "3-|"]),
        (4, 1, ["4|"]),
        (1000, 2, ["4", "4"]),
    ],
)
def test_whole_epochs_are_fed_until_an_incomplete_group_and_the_next_one(
    epoch_length: int | None, cycles: int, expected: list[str]
) -> None:
    """epoch_length counts micro-batches; the group that is left over is fed, and the first one after it."""
    plan = plan_of(X, epoch_length=epoch_length, cycles=cycles)
    assert sizes(plan) == expected
    assert [group.first for group in plan.groups] == [
        sum(len(group.parts) for group in plan.groups[:number]) for number in range(len(plan.groups))
    ]


def test_the_micro_batches_of_an_incomplete_group_are_of_the_usual_size() -> None:
    """Its full batch holds just their examples."""
    group = plan_of(X, epoch_length=6).groups[1]
    assert [len(part) for part in group.parts] == [2, 2]
    assert torch.equal(group.full, X[:4])


def test_a_given_split_gets_the_size_of_an_incomplete_group() -> None:
    """And the whole batch, which is then cut into fewer parts."""
    asked = []

    def split(batch: Tensor, parts: int) -> list[Tensor]:
        asked.append(parts)
        return list(batch.chunk(parts))

    plan = plan_of(X, epoch_length=6, split=split)
    assert asked == [4, 2, 4]
    assert torch.equal(plan.groups[1].full, X)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(40, 3))


def loader(batches: int) -> DataLoader:
    return DataLoader(torch.randn(batches * 4, 3), batch_size=4)


@pytest.mark.parametrize(
    ("data", "expected", "implied"),
    [
        (loader(6), ["4", "2-|", "4"], True),
        (loader(8), ["4", "4"], False),
        (loader(2), ["2-|", "2-|"], True),
        (loader(MAX_IMPLIED_EPOCH + 1), ["4", "4"], False),
        (DataLoader(Stream(), batch_size=4), ["4", "4"], False),
        ([X] * 6, ["4", "4"], False),
    ],
    ids=["6 batches", "8 batches", "2 batches", "too many", "no length", "a list"],
)
def test_a_loaders_length_is_an_epochs(data: Any, expected: list[str], implied: bool) -> None:
    """Where its last group would be incomplete and it is short enough to be fed whole."""
    plan = plan_of(data)
    assert sizes(plan) == expected
    assert (plan.epoch_length is not None) == implied == (plan.implied and implied)


def test_an_epoch_length_that_was_given_is_not_implied() -> None:
    """It goes before the loader's length."""
    plan = plan_of(loader(6), epoch_length=7)
    assert (sizes(plan), plan.implied) == (["4", "3-|", "4"], False)
