from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup


def make(count=1):
    model = nn.Linear(2, 1)
    return model, *(torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(count))


def schedule(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


class Duck:
    """An optimizer by its methods only."""

    param_groups = ()

    def step(self):
        pass

    def zero_grad(self):
        pass


def test_single_parts_are_named_by_their_kind():
    """One optimizer is `optimizer`, one scheduler `scheduler`, and both are at hand without a name."""
    model, optimizer = make()
    scheduler = schedule(optimizer)
    setup = TrainingSetup(model, optimizer, scheduler)
    assert setup.model is model
    assert setup.optimizers == {"optimizer": optimizer}
    assert setup.schedulers == {"scheduler": scheduler}
    assert setup.optimizer is optimizer
    assert setup.scheduler is scheduler
    assert (setup.scaler, setup.state, setup.step_index) == (None, {}, 0)


def test_the_parts_of_a_list_are_numbered():
    """Lists and tuples give `optimizer[0]`, `optimizer[1]`, ..."""
    model, first, second = make(2)
    setup = TrainingSetup(model, [first, second], (schedule(first), schedule(second)))
    assert list(setup.optimizers) == ["optimizer[0]", "optimizer[1]"]
    assert list(setup.schedulers) == ["scheduler[0]", "scheduler[1]"]


def test_a_dict_is_used_itself():
    """A loop may replace the entries of its own dict, or fill an empty one."""
    model, first, second = make(2)
    mine = {}
    setup = TrainingSetup(model, mine)
    mine["main"] = first
    assert setup.optimizer is first
    setup.optimizers["main"] = second
    assert mine == {"main": second}


def test_the_only_optimizer_can_be_replaced():
    """Assigning to `.optimizer` or `.scheduler` keeps the name."""
    model, first, second = make(2)
    setup = TrainingSetup(model, {"main": first}, schedule(first))
    setup.optimizer = second
    setup.scheduler = scheduler = schedule(second)
    assert setup.optimizers == {"main": second}
    assert setup.schedulers == {"scheduler": scheduler}
    with pytest.raises(TypeError):
        setup.optimizer = model


def test_anything_with_the_methods_is_an_optimizer():
    """Optimizers need not derive from torch's."""
    duck = Duck()
    assert TrainingSetup(make()[0], duck).optimizer is duck


def test_other_objects_are_kept():
    """State is a dict of anything, and plain attributes may be added."""
    state = {"ema": object(), "seen": [1]}
    setup = TrainingSetup(*make(), state=state)
    setup.criterion = nn.MSELoss()
    assert setup.state is state
    assert isinstance(setup.criterion, nn.MSELoss)


def test_a_setup_does_not_share_its_state():
    """The default state is a new dict in every setup."""
    assert TrainingSetup(*make()).state is not TrainingSetup(*make()).state


def test_a_setup_shows_its_parts():
    """The repr names the parts and their classes."""
    model, first, second = make(2)
    setup = TrainingSetup(model, [first, second], schedule(first), torch.amp.GradScaler("cpu"), {"ema": model})
    assert repr(setup) == (
        "TrainingSetup(Linear, optimizers: optimizer[0] (SGD), optimizer[1] (SGD), schedulers: scheduler (ConstantLR), "
        "state: ema (Linear), scaler: GradScaler)"
    )


def test_the_only_part_is_asked_for_where_there_are_more():
    """`.optimizer` and `.scheduler` list the names when there is not exactly one."""
    model, first, second = make(2)
    setup = TrainingSetup(model, {"gen": first, "disc": second})
    with pytest.raises(AttributeError) as caught:
        _ = setup.optimizer
    message = "the setup has 2 optimizers, 'gen', 'disc': choose one, setup.optimizers['gen']"
    assert str(caught.value) == message
    with pytest.raises(AttributeError) as caught:
        setup.optimizer = first
    assert str(caught.value) == message
    with pytest.raises(AttributeError) as caught:
        _ = setup.scheduler
    assert str(caught.value) == "the setup has no scheduler"


MODEL, FIRST, SECOND = make(2)
SCHEDULER = schedule(FIRST)
OPTIMIZER_NEEDS = "must be an optimizer (with step, zero_grad and param_groups), got"
BAD = {
    "swapped": ((FIRST, MODEL), TypeError, "model and optimizers are swapped: the model comes first"),
    "no model": ((None, FIRST), TypeError, "model must be a torch.nn.Module, got a NoneType"),
    "model class": ((nn.Linear, FIRST), TypeError, "model must be a torch.nn.Module, got the class Linear"),
    "models": (
        ([MODEL], FIRST),
        TypeError,
        "model must be a torch.nn.Module, got a list; put several models into one nn.ModuleDict",
    ),
    "no optimizer": ((MODEL, None), TypeError, f"optimizer {OPTIMIZER_NEEDS} None"),
    "parameters": ((MODEL, iter([1])), TypeError, f"optimizer {OPTIMIZER_NEEDS} a list_iterator"),
    "optimizer class": (
        (MODEL, [torch.optim.SGD]),
        TypeError,
        f"optimizer[0] {OPTIMIZER_NEEDS} the class SGD: build it, with the model's parameters",
    ),
    "scheduler as optimizer": (
        (MODEL, {"main": SCHEDULER}),
        TypeError,
        f"main {OPTIMIZER_NEEDS} a ConstantLR: a scheduler goes to schedulers=",
    ),
    "empty list": ((MODEL, []), ValueError, "optimizers is an empty list; pass at least one optimizer"),
    "number as name": ((MODEL, {0: FIRST}), TypeError, "the names of optimizers must be strings, got 0"),
    "same optimizer": (
        (MODEL, [FIRST, SECOND, FIRST]),
        ValueError,
        "optimizers holds the same SGD twice, as 'optimizer[0]' and 'optimizer[2]'",
    ),
    "same scheduler": (
        (MODEL, FIRST, {"a": SCHEDULER, "b": SCHEDULER}),
        ValueError,
        "schedulers holds the same ConstantLR twice, as 'a' and 'b'",
    ),
    "optimizer as scheduler": (
        (MODEL, FIRST, SECOND),
        TypeError,
        "scheduler must be a scheduler, got the optimizer SGD",
    ),
    "scaler as scheduler": (
        (MODEL, FIRST, torch.amp.GradScaler("cpu")),
        TypeError,
        "scheduler must be a scheduler (with a step method), got a GradScaler: a scaler goes to scaler=",
    ),
    "scheduler class": (
        (MODEL, FIRST, torch.optim.lr_scheduler.ConstantLR),
        TypeError,
        "scheduler must be a scheduler (with a step method), got the class ConstantLR",
    ),
    "scaler flag": (
        (MODEL, FIRST, None, True),
        TypeError,
        "scaler must be a GradScaler (with scale, unscale_, step, update, get_scale) or None, got a bool",
    ),
    "scaler class": (
        (MODEL, FIRST, None, torch.amp.GradScaler),
        TypeError,
        "scaler must be a GradScaler (with scale, unscale_, step, update, get_scale) or None, got the class GradScaler",
    ),
    "state": ((MODEL, FIRST, None, None, [1]), TypeError, "state must be a dict of named objects, got list"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_belong_is_refused(name):
    """The error names the argument, what was got and what is allowed."""
    arguments, error, message = BAD[name]
    with pytest.raises(error) as caught:
        TrainingSetup(*arguments)
    assert str(caught.value) == message
