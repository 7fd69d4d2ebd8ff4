from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tl_core import TrainingSetup
from tl_telemetry import observe, run_training

X = torch.ones(2, 3)
LOSS = "return the loss: a real tensor with one element, a number, or a dict of named ones"
DATA = (
    "data must be one batch, a list of batches, an iterable of batches such as a DataLoader, "
    "or a function from the step index to a batch"
)
ONE_OF = "step(setup, batch) trains, loss_fn(model, batch) only computes the loss"
FORMS = "a TrainingSetup or a tuple (model, optimizer[, scheduler[, scaler[, state]]])"


def make_setup():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(setup, batch):
    return setup.model(batch).sum()


def returning(value):
    return lambda setup, batch: value


def swapped():
    model, optimizer = make_setup()
    return optimizer, model


def two_arguments(device, width):
    return make_setup()


KEPT = make_setup()


def exhausted():
    iterator = iter([X])
    next(iterator)
    return iterator


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": -3}, ValueError, "steps must be at least 1, got -3"),
        ({"steps": 2.0}, TypeError, "steps must be an int, got float 2.0"),
        ({"data": None}, TypeError, f"{DATA}; got None"),
        ({"data": []}, ValueError, f"data is an empty list; {DATA}"),
        (
            {"data": TensorDataset(X)},
            TypeError,
            "data is a dataset (TensorDataset), whose items are not batches: wrap it in a DataLoader, "
            "DataLoader(data, batch_size=...), or with batch_size=None if it makes batches itself",
        ),
        (
            {"data": exhausted()},
            ValueError,
            "data (list_iterator) is an exhausted iterator: it is empty, and steps=4 needs 4",
        ),
        (
            {"data": iter([X, X])},
            ValueError,
            "data is a one-shot iterator (list_iterator) that gave 2 batches, but steps=4 needs 4: pass more batches, "
            "a list, or a loader that can be iterated again",
        ),
        (
            {"step": None},
            TypeError,
            f"pass either step or loss_fn, got neither: {ONE_OF}",
        ),
        (
            {"loss_fn": lambda model, batch: model(batch).sum()},
            TypeError,
            f"pass either step or loss_fn, got both: {ONE_OF}",
        ),
        ({"step": 3}, TypeError, "step must be a function, got int"),
        ({"step": None, "loss_fn": "mse"}, TypeError, "loss_fn must be a function, got str"),
        ({"step": returning(None)}, TypeError, f"step() returned None at step 0; {LOSS}"),
        ({"step": returning("0.5")}, TypeError, f"step() returned a str '0.5' at step 0; {LOSS}"),
        ({"step": returning(1j)}, TypeError, f"step() returned a complex 1j at step 0; {LOSS}"),
        (
            {"step": returning(torch.tensor(1j))},
            TypeError,
            f"step() returned a complex64 tensor at step 0; {LOSS}",
        ),
        ({"step": returning(X)}, ValueError, f"step() returned a tensor of shape (2, 3) at step 0; {LOSS}"),
        ({"step": returning({})}, ValueError, f"step() returned an empty dict at step 0; {LOSS}"),
        (
            {"step": returning({"loss": None})},
            TypeError,
            f"step() returned a dict whose 'loss' is None at step 0; {LOSS}",
        ),
        ({"device": 0}, TypeError, "device must be a string or a torch.device, got int 0"),
        (
            {"make_setup": two_arguments},
            TypeError,
            "make_setup must take no argument or only the device, got two_arguments(device, width)",
        ),
        (
            {"make_setup": nn.Linear(3, 1)},
            TypeError,
            "make_setup must be a function that builds the setup anew, got a Linear",
        ),
        ({"make_setup": lambda: None}, TypeError, f"make_setup() returned None: return {FORMS}"),
    ],
)
def test_bad_input_of_run_training(arguments, error, message):
    """Each wrong argument is an error that names it, what was got and what is allowed."""
    call = {"make_setup": make_setup, "data": X, "step": step, "steps": 4, **arguments}
    with pytest.raises(error) as caught:
        run_training(**call)
    assert str(caught.value) == message


def test_swapped_model_and_optimizer():
    """A setup with model and optimizer swapped says so."""
    with pytest.raises(TypeError) as caught:
        run_training(swapped, X, step)
    assert str(caught.value) == "model and optimizers are swapped: the model comes first"


def test_an_unknown_device_lists_those_there_are():
    """A device that does not exist is an error with the available ones."""
    with pytest.raises(ValueError, match=r"^device 'tpu9' is not available; available are cpu"):
        run_training(make_setup, X, step, device="tpu9")


def test_the_same_objects_twice():
    """A make_setup that hands out the objects of an earlier run would mix the two."""
    run_training(lambda: KEPT, X, step, steps=1)
    with pytest.raises(ValueError) as caught:
        run_training(lambda: KEPT, X, step, steps=1)
    assert str(caught.value) == (
        "make_setup() returned the same model as an earlier call: every run needs a fresh setup, so build the model "
        "and the optimizers inside make_setup()"
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: observe(nn.Linear(3, 1)),
            TypeError,
            "setup must be a TrainingSetup, got Linear: write TrainingSetup(model, optimizer, ...)",
        ),
        (
            lambda: observe(TrainingSetup(*make_setup()), allow="lr-zero"),
            TypeError,
            "allow must be a list of rule ids, got 'lr-zero': write ['lr-zero']",
        ),
        (
            lambda: observe(TrainingSetup(*make_setup()), allow=["lr-zer"]),
            ValueError,
            "allow names the rule 'lr-zer', which does not exist; did you mean lr-zero, group-lr-zero?",
        ),
    ],
)
def test_bad_input_of_observe(call, error, message):
    """Each wrong argument of observe is an error when the block is entered."""
    with pytest.raises(error) as caught, call():
        pass
    assert str(caught.value) == message


def test_a_loss_that_is_none_names_the_step():
    """A step of a custom loop that is given something that is no loss is told which step it was."""
    with observe(TrainingSetup(*make_setup())) as run:
        for value in (1.0, None):
            with pytest.raises(TypeError) if value is None else run.step() as current:
                if value is None:
                    with run.step() as current:
                        current.loss = None
                else:
                    current.loss = value
    assert len(run.records) == 2
    assert run.losses == [1.0]


@pytest.mark.parametrize("bad", ["a pattern", None])
def test_a_wrong_argument_runs_nothing(bad):
    """Arguments are checked before the setup is built."""
    built = []

    def make():
        built.append(None)
        return make_setup()

    with pytest.raises(TypeError):
        run_training(make, X, step=bad)
    assert built == []
