"""Misuse of the resume check: each argument's errors, with their whole messages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tl_resume import assert_resume_equivalent, check_resume_equivalent

DATA_IS = (
    "data must be one batch, a list of batches, an iterable of batches such as a DataLoader, or a function from the "
    "step index to a batch"
)
LOSS_IS = "return the loss: a real tensor with one element, a number, or a dict of named ones"
STEP_IS = (
    "step(setup, batch) trains, loss_fn(model, batch) only computes the loss, make_step() builds a step for each run"
)


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def step(setup: Any, batch: Any) -> torch.Tensor:
    loss = loss_fn(setup.model, batch)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: Any, path: Path) -> None:
    torch.save(setup.model.state_dict(), path)


def load(setup: Any, path: Path) -> None:
    setup.model.load_state_dict(torch.load(path))


def give_nothing(setup: Any, batch: Any) -> None:
    """Train, and forget to return the loss."""


def give_two(setup: Any, batch: Any) -> torch.Tensor:
    return torch.ones(2)


def error_of(**changed: Any) -> str:
    """Return the error that the check raises for a correct call with some arguments changed."""
    arguments = {"make_setup": make_setup, "data": torch.ones(2, 3), "loss_fn": loss_fn, **changed}
    with pytest.raises((TypeError, ValueError)) as caught:
        check_resume_equivalent(**arguments)
    return f"{caught.type.__name__}: {caught.value}"


def test_the_call_is_correct_but_for_what_is_changed() -> None:
    """Without a mistake the call passes, so that each error below is about its own mistake."""
    assert check_resume_equivalent(make_setup, torch.ones(2, 3), loss_fn=loss_fn).ok
    assert check_resume_equivalent(make_setup, torch.ones(2, 3), step, save=save, load=load).ok


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_fn": None}, f"TypeError: pass one of step, loss_fn and make_step, got none: {STEP_IS}"),
        ({"step": step}, f"TypeError: pass one of step, loss_fn and make_step, got step and loss_fn: {STEP_IS}"),
        (
            {"make_step": lambda: step},
            f"TypeError: pass one of step, loss_fn and make_step, got loss_fn and make_step: {STEP_IS}",
        ),
        ({"loss_fn": None, "step": 3}, "TypeError: step must be a function, got int"),
        ({"loss_fn": "mse"}, "TypeError: loss_fn must be a function, got str"),
        ({"loss_fn": None, "make_step": [step]}, "TypeError: make_step must be a function, got list"),
        (
            {"loss_fn": None, "make_step": lambda: 5},
            "TypeError: make_step() must return a function step(setup, batch), got a int",
        ),
        ({"make_setup": 3}, "TypeError: make_setup must be a function that builds the setup anew, got a int"),
        (
            {"make_setup": lambda: None},
            "TypeError: make_setup() returned None: return a TrainingSetup or a tuple (model, optimizer[, scheduler[, "
            "scaler[, state]]])",
        ),
        (
            {"loss_fn": None, "step": give_nothing},
            f"TypeError: step() returned None at step 0; {LOSS_IS}",
        ),
        (
            {"loss_fn": None, "step": give_two},
            f"ValueError: step() returned a tensor of shape (2,) at step 0; {LOSS_IS}",
        ),
    ],
)
def test_functions_that_train(changed: dict[str, Any], message: str) -> None:
    """One of step, loss_fn and make_step is given, a function; it and make_setup return what they must."""
    assert error_of(**changed) == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"save": 3, "load": load}, "TypeError: save must be a function, got int"),
        ({"save": save, "load": "path"}, "TypeError: load must be a function, got str"),
        (
            {"save": save},
            "TypeError: pass both save and load, or neither (the training state is saved then); load is missing",
        ),
        (
            {"load": load},
            "TypeError: pass both save and load, or neither (the training state is saved then); save is missing",
        ),
    ],
)
def test_functions_that_save(changed: dict[str, Any], message: str) -> None:
    """Save and load are given together, as functions."""
    assert error_of(**changed) == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": True}, "TypeError: steps must be an int, got bool True"),
        ({"steps": 4.0}, "TypeError: steps must be an int, got float 4.0"),
        ({"steps": None}, "ValueError: steps must be at least 2, one before and one after the resume; got None"),
        ({"steps": 1}, "ValueError: steps must be at least 2, one before and one after the resume; got 1"),
        ({"resume_at": "4"}, "TypeError: resume_at must be an int, got str '4'"),
        ({"resume_at": True}, "TypeError: resume_at must be an int, got bool True"),
        ({"resume_at": 0}, "ValueError: resume_at must be from 1 to steps - 1 = 7, got 0"),
        ({"resume_at": 8}, "ValueError: resume_at must be from 1 to steps - 1 = 7, got 8"),
        ({"steps": 2, "resume_at": 2}, "ValueError: resume_at must be from 1 to steps - 1 = 1, got 2"),
        ({"seed": "a"}, "TypeError: seed must be an int, got str 'a'"),
        ({"seed": -1}, "ValueError: seed must be from 0 to 2**32 - 1, got -1"),
        ({"rtol": -1.0}, "ValueError: tolerance 'training_resume': rtol must be finite and >= 0, got -1.0"),
        ({"rtol": "a"}, "TypeError: tolerance 'training_resume': rtol must be a number, got str 'a'"),
        ({"atol": float("nan")}, "ValueError: tolerance 'training_resume': atol must be finite and >= 0, got nan"),
        ({"device": "gpu"}, "ValueError: tolerance 'training_resume': 'gpu' is not a device"),
    ],
)
def test_numbers_and_the_device(changed: dict[str, Any], message: str) -> None:
    """Steps, resume_at, seed, tolerances and the device are of their types and within their bounds."""
    assert error_of(**changed) == message


def test_the_smallest_and_the_largest_that_are_allowed() -> None:
    """Two steps, the last step to resume at and the largest seed are no errors; the resumed seed wraps around."""
    report = check_resume_equivalent(make_setup, torch.ones(2, 3), loss_fn=loss_fn, steps=2, seed=2**32 - 1)
    assert report.ok
    assert report.resume_at == 1
    assert check_resume_equivalent(make_setup, torch.ones(2, 3), loss_fn=loss_fn, resume_at=7).resume_at == 7


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        (
            "rng-not-restored",
            "TypeError: allow must be a list of rule ids, got 'rng-not-restored': write ['rng-not-restored']",
        ),
        (3, "TypeError: allow must be a list of rule ids, got 3"),
        ([3], "TypeError: allow must hold rule ids (strings), got 3"),
        (
            ["step-not-restord"],
            "ValueError: allow names the rule 'step-not-restord', which does not exist; did you mean "
            "step-not-restored, state-not-restored, scaler-not-restored?",
        ),
    ],
)
def test_allow(allow: Any, message: str) -> None:
    """A list of ids that exist; a misspelt one is told the nearest."""
    assert error_of(allow=allow) == message


def test_allow_lists_all_where_none_is_near() -> None:
    """An id that is like none gets the whole list, findings and notes."""
    message = error_of(allow=["xyz"])
    assert message.startswith(
        "ValueError: allow names the rule 'xyz', which does not exist; there are saving-changes-training, "
    )
    assert message.endswith(", unsaved-attribute, resume-moved, not-repeatable, not-copied, not-judged")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, f"TypeError: {DATA_IS}; got None"),
        ([], f"ValueError: data is an empty list; {DATA_IS}"),
        (
            lambda: torch.ones(2, 3),
            "TypeError: data as a function takes the step index as its only argument; got <lambda>()",
        ),
    ],
)
def test_data(data: Any, message: str) -> None:
    """Data that give no batches are an error."""
    assert error_of(data=data) == message


def test_an_iterator_that_is_too_short() -> None:
    """A one-shot iterator must have a batch for every step."""
    assert error_of(data=iter([torch.ones(2, 3)] * 2)) == (
        "ValueError: data is a one-shot iterator (list_iterator) that gave 2 batches, but steps=8 needs 8: pass more "
        "batches, a list, or a loader that can be iterated again"
    )


def test_a_fresh_process_needs_functions_of_a_module() -> None:
    """Local functions, lambdas, bound methods and partials are an error that names the argument."""
    needs = (
        "ValueError: fresh_process=True needs functions at the top of a module, which a new process can import; "
        "{} is {} (a local function, a lambda, a bound method or a partial cannot be imported)"
    )

    def local_step(setup: Any, batch: Any) -> torch.Tensor:
        return step(setup, batch)

    name = "test_a_fresh_process_needs_functions_of_a_module.<locals>.local_step"
    assert error_of(loss_fn=None, step=local_step, fresh_process=True) == needs.format("step", name)
    bound = threading.Event().wait
    assert error_of(save=bound, load=load, fresh_process=True) == needs.format("save", "Event.wait")


def test_both_faces_take_the_same_arguments() -> None:
    """The assertion raises the same errors of misuse, and no CheckFailed."""
    with pytest.raises(ValueError, match=r"^steps must be at least 2, one before and one after the resume; got 0$"):
        assert_resume_equivalent(make_setup, torch.ones(2, 3), loss_fn=loss_fn, steps=0)
