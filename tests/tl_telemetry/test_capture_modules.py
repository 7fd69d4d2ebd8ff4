"""Modules and optimizers in a capture: their attributes, modes, names and keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tl_core import TrainingSetup
from tl_telemetry import Piece, capture_state, compare_captures, put_back

HELD = Piece("attribute", "held")


def make(value: object = None, model: nn.Module | None = None, **options: object) -> TrainingSetup:
    model = nn.Linear(2, 1) if model is None else model
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    setup.held = value
    return setup


class Counting(nn.Module):
    """A module with plain attributes, a hidden module, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.tied = self.layer
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls, self.cache = 0, {}
        self.__dict__["hidden"] = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.cache["last"] = inputs.detach()
        return self.hidden(self.layer(inputs))


def changed_counting(model: nn.Module) -> None:
    model(torch.ones(1, 1))
    model.eval()
    model.hidden.bias.data.add_(1)
    model.note = "set later"


@pytest.mark.parametrize("place", ["model", "state", "attribute"])
def test_modules_with_plain_attributes(place):
    """A module's attributes, modes, unsaved buffers and hidden modules are state, as the model and elsewhere."""

    def build():
        module = Counting()
        setup = make(module if place == "attribute" else None, model=module if place == "model" else None)
        if place == "state":
            setup.state["extra"] = module
        return setup, module

    setup, module = build()
    capture = capture_state(setup)
    changed_counting(module)
    fresh, other = build()
    changed_counting(other)
    for target, inner in ((setup, module), (fresh, other)):
        assert compare_captures(capture, capture_state(target)) != []
        put_back(capture, target, capture.pieces)
        assert compare_captures(capture, capture_state(target)) == []
        assert (inner.calls, inner.cache, inner.training, float(inner.seen)) == (0, {}, True, 0.0)
        assert "note" not in vars(inner)
        assert "hidden" not in inner._modules


def test_frozen_parameters():
    """Which parameters are trainable is a piece, of the model and of modules elsewhere."""
    setup = make(nn.Linear(1, 1))
    capture = capture_state(setup)
    setup.model.weight.requires_grad_(False)
    setup.held.weight.requires_grad_(False)
    differing = [(d.piece, d.path) for d in compare_captures(capture, capture_state(setup))]
    assert differing == [(Piece("trainable"), ("weight",)), (HELD, ("trainable", "weight"))]
    put_back(capture, setup, capture.pieces)
    assert setup.model.weight.requires_grad
    assert setup.held.weight.requires_grad


def test_weights_of_another_shape_and_of_no_shape_yet():
    """A grown layer and a lazy one get the captured content; optimizers keep their parameter."""
    capture = capture_state(make(model=nn.Linear(3, 1)))
    grown, lazy = make(model=nn.Linear(5, 1)), nn.LazyLinear(1)
    parameter = grown.model.weight
    put_back(capture, grown, [Piece("weights")])
    fresh = make(model=lazy)
    put_back(capture, fresh, [Piece("weights")])
    for setup in (grown, fresh):
        assert [d for d in compare_captures(capture, capture_state(setup)) if d.piece == Piece("weights")] == []
        assert setup.model(torch.ones(1, 3)).shape == (1, 1)
    assert grown.model.weight is parameter
    assert grown.optimizer.param_groups[0]["params"][0] is parameter


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_wrapped_models_have_the_names_of_their_author(wrap):
    """A capture of a plain model and one of the wrapped model have the same names, so one fits the other."""

    def build(wrapped):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return make(model=wrap(model) if wrapped else model)

    capture = capture_state(build(False))
    wrapped = build(True)
    assert set(capture.pieces[Piece("weights")].items) >= {"0.weight", "1.running_mean"}
    put_back(capture, wrapped, capture.pieces)
    assert compare_captures(capture, capture_state(wrapped)) == []
    from_wrapped = capture_state(wrapped)
    plain = build(False)
    put_back(from_wrapped, plain, from_wrapped.pieces)
    assert compare_captures(capture, capture_state(plain)) == []


def test_tied_weights_and_averaged_models():
    """A tied weight is captured once, and an averaged model in the state by its own weights."""

    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return make(model=model, state={"swa": AveragedModel(model)})

    setup, fresh = build(), build()
    capture = capture_state(setup)
    fresh.state["swa"].update_parameters(fresh.model)
    put_back(capture, fresh, capture.pieces)
    assert compare_captures(capture, capture_state(fresh)) == []
    assert fresh.model[1].weight is fresh.model[0].weight
    assert int(fresh.state["swa"].n_averaged) == 0


class Odd(torch.optim.SGD):
    """An optimizer with state under integers and strings, and an attribute that comes later."""


def test_an_optimizers_state_of_any_key():
    """State under strings and numbers is kept, and that of a parameter of the model which has left the groups."""
    setup = make()
    setup.optimizer = Odd(setup.model.parameters(), lr=0.1)
    weight, _ = setup.model.parameters()
    setup.optimizer.state.update({"total": 1.5, 0: {"seen": None}, weight: {"m": torch.ones(2)}})
    setup.optimizer.param_groups[0]["params"].remove(weight)
    setup.optimizer.state[torch.ones(1)] = {"m": 1}
    capture = capture_state(setup)
    assert set(capture.pieces[Piece("optimizer state", "optimizer")].items) == {"total", 0, "weight"}
    setup.optimizer.state.clear()
    setup.optimizer.state["later"] = 3
    setup.optimizer.later = 1
    put_back(capture, setup, capture.pieces)
    assert compare_captures(capture, capture_state(setup)) == []
    assert set(setup.optimizer.state) == {"total", 0, weight}
    assert setup.optimizer.state[weight]["m"].tolist() == [1.0, 1.0]
    assert setup.optimizer.param_groups[0]["lr"] == 0.1
    assert not hasattr(setup.optimizer, "later")


def test_an_optimizer_with_loose_tensors():
    """Parameters that no module has are named by their place in the groups."""

    def build(value):
        loose = torch.full((1,), value, requires_grad=True)
        model = nn.Linear(1, 1)
        setup = TrainingSetup(
            model, torch.optim.SGD([{"params": [loose]}, {"params": model.weight}], lr=0.1, momentum=1)
        )
        (loose * model.weight).sum().backward()
        setup.optimizer.step()
        return setup

    setup, fresh = build(1.0), build(2.0)
    capture = capture_state(setup)
    assert capture.order == {"optimizer": [["param_groups[0]['params'][0]"], ["weight"]]}
    put_back(capture, fresh, [Piece("optimizer state", "optimizer")])
    left = [d.piece for d in compare_captures(capture, capture_state(fresh))]
    assert Piece("optimizer state", "optimizer") not in left
