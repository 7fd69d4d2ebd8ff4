from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup, build_setup

FORMS = "a TrainingSetup or a tuple (model, optimizer[, scheduler[, scaler[, state]]])"
AVAILABLE = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def make_setup():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_tuple_becomes_a_setup():
    """A tuple's parts are those of TrainingSetup, in order."""

    def full():
        model, optimizer = make_setup()
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return model, {"main": optimizer}, scheduler, torch.amp.GradScaler("cpu"), {"seen": [0]}

    setup = build_setup(full)
    assert isinstance(setup, TrainingSetup)
    assert list(setup.optimizers) == ["main"]
    assert list(setup.schedulers) == ["scheduler"]
    assert isinstance(setup.scaler, torch.amp.GradScaler)
    assert setup.state == {"seen": [0]}


def test_a_setup_is_returned_itself():
    """A TrainingSetup keeps its identity and its extra attributes."""
    made = []

    def make():
        made.append(TrainingSetup(*make_setup()))
        return made[-1]

    assert build_setup(make) is made[0]


def needed(device):
    return needed.got.append(device) or make_setup()


def optional(device="cuda"):
    return optional.got.append(device) or make_setup()


def keyword(*, device):
    return keyword.got.append(device) or make_setup()


def second(width=2, device="cuda"):
    return second.got.append(device) or make_setup()


def otherwise_named(where):
    return otherwise_named.got.append(where) or make_setup()


def positional_only(device="cuda", /):
    return positional_only.got.append(device) or make_setup()


@pytest.mark.parametrize("make", [needed, optional, keyword, second, otherwise_named, positional_only])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["string", "device"])
def test_the_device_is_handed_over(make, device):
    """A make_setup that takes the device gets it as the caller wrote it."""
    make.got = []
    build_setup(make, device)
    assert make.got == [device]


def test_other_defaults_are_left():
    """A make_setup whose parameters all have defaults and are no device is called without any."""
    build_setup(lambda width=2, *args, **options: make_setup())


def two(width, device):
    return make_setup()


def one_more(width, device="cpu"):
    return make_setup()


def keyword_width(*, width):
    return make_setup()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two, "make_setup must take no argument or only the device, got two(width, device)"),
        (one_more, "make_setup must take no argument or only the device, got one_more(width, device='cpu')"),
        (keyword_width, "make_setup must take no argument or only the device, got keyword_width(*, width)"),
        (make_setup(), "make_setup must be a function that builds the setup anew, got a tuple"),
        (nn.Linear(1, 1), "make_setup must be a function that builds the setup anew, got a Linear"),
    ],
    ids=["two", "one more", "keyword", "tuple", "module"],
)
def test_a_make_setup_with_other_arguments_is_refused(make, message):
    """The error shows the signature and says what is allowed."""
    with pytest.raises(TypeError) as caught:
        build_setup(make)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, f"make_setup() returned None: return {FORMS}"),
        ({"model": 1}, f"make_setup() must return {FORMS}, got a dict"),
        ((nn.Linear(1, 1),), f"make_setup() must return {FORMS}, got 1 element"),
        ((1, 2, 3, 4, 5, 6), f"make_setup() must return {FORMS}, got 6 elements"),
    ],
    ids=["nothing", "dict", "one", "six"],
)
def test_a_make_setup_that_returns_something_else_is_refused(made, message):
    """The error names what was returned."""
    with pytest.raises(TypeError) as caught:
        build_setup(lambda: made)
    assert str(caught.value) == message


def fresh(what):
    return (
        f"make_setup() returned {what} as an earlier call: every run needs a fresh setup, "
        "so build the model and the optimizers inside make_setup()"
    )


def test_the_same_model_twice_is_refused():
    """A model built outside make_setup would carry one run into the next."""
    made = make_setup()
    build_setup(lambda: made)
    with pytest.raises(ValueError) as caught:
        build_setup(lambda: made)
    assert str(caught.value) == fresh("the same model")


def test_the_same_optimizer_twice_is_refused():
    """So would an optimizer."""
    optimizer = make_setup()[1]
    build_setup(lambda: (nn.Linear(2, 1), optimizer))
    with pytest.raises(ValueError) as caught:
        build_setup(lambda: (nn.Linear(2, 1), {"main": optimizer}))
    assert str(caught.value) == fresh("the same optimizer 'main'")


def test_the_same_trained_part_twice_is_refused():
    """So would a trainable part inside a new model; a frozen one may be shared."""
    backbone = nn.Linear(2, 2)

    def make():
        model = nn.Sequential(backbone, nn.Linear(2, 1))
        return model, torch.optim.SGD(model[1].parameters(), lr=0.1)

    backbone.requires_grad_(False)
    build_setup(make)
    build_setup(make)
    backbone.requires_grad_(True)
    build_setup(make)
    with pytest.raises(ValueError) as caught:
        build_setup(make)
    assert str(caught.value) == fresh("a model whose parameter '0.weight' is the same object")


def test_setups_that_are_gone_are_forgotten():
    """Nothing is kept alive, and a new object at an old address is a new object."""
    for _ in range(50):
        build_setup(make_setup)


@pytest.mark.parametrize("device", ["gpu", "cuda:97", torch.device("meta")], ids=str)
def test_an_unknown_device_is_refused(device):
    """The error names the device and those that are there."""
    name = str(device)
    with pytest.raises(ValueError) as caught:
        build_setup(make_setup, device)
    assert str(caught.value) == f"device {name!r} is not available; available are {', '.join(AVAILABLE)}"


def test_a_device_of_another_type_is_refused():
    """A device is a string or a torch.device."""
    with pytest.raises(TypeError) as caught:
        build_setup(make_setup, 0)
    assert str(caught.value) == "device must be a string or a torch.device, got int 0"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_an_error_in_make_setup_passes_with_a_note():
    """The person's own exception comes through, with a note of where."""

    def broken():
        raise KeyError("width")

    with pytest.raises(KeyError) as caught:
        build_setup(broken)
    assert caught.value.__notes__ == ["raised in make_setup()"]


def test_a_model_wholly_in_eval_mode_is_put_in_training_mode():
    """Pretrained models come in eval mode."""

    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        return model.eval(), torch.optim.SGD(model.parameters(), lr=0.1)

    assert all(module.training for module in build_setup(make).model.modules())


def test_mixed_modes_are_left():
    """A frozen part in eval mode is meant."""

    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].eval()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert [module.training for module in build_setup(make).model.modules()] == [True, True, False]


def test_lazy_models_are_built():
    """A model without shapes can be prepared."""

    def make():
        model = nn.Sequential(nn.LazyLinear(2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert isinstance(build_setup(make).model[0], nn.LazyLinear)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_everything_is_moved():
    """The model, modules in state and the moments of a used optimizer are on the device; parameters stay the same."""
    made = []

    def make():
        model, criterion = nn.Linear(2, 1), nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        made.append(model.weight)
        return model, optimizer, None, None, {"criterion": criterion}

    setup = build_setup(make, "cuda")
    assert setup.model.weight is made[0]
    assert setup.model.weight.device.type == "cuda"
    assert setup.state["criterion"].weight.device.type == "cuda"
    assert setup.optimizer.state[setup.model.weight]["exp_avg"].device.type == "cuda"
    setup.model(torch.ones(1, 2, device="cuda")).sum().backward()
    setup.optimizer.step()
