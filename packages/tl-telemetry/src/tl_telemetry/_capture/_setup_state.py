"""Captures what a setup holds at one moment, piece by piece."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tl_core import TrainingSetup
from tl_telemetry._capture._generators import capture_generator
from tl_telemetry._capture._kinds import is_library, is_plain
from tl_telemetry._capture._modules import module_tensors
from tl_telemetry._capture._nodes import Container, Node, Plain
from tl_telemetry._capture._pieces import Piece, StateCapture
from tl_telemetry._capture._walk import Keep, Walk, keep_in_memory

# What every optimizer of torch has beside its state and groups: arguments and machinery.
_OPTIMIZER_PARTS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "step"}
# What a setup always has; anything else was added by the person.
_SETUP_PARTS = frozenset(vars(TrainingSetup(torch.nn.Module(), {})))


def capture_state(
    setup: TrainingSetup, *, outside: Mapping[str, Any] | None = None, keep: Keep = keep_in_memory
) -> StateCapture:
    """Capture the whole state of a setup, and of things outside of it, without changing anything.

    What is captured is what is there, not what a ``state_dict`` tells: plain attributes of the person's objects,
    generators and iterators among them. What is met twice is captured once.

    Args:
        setup: the setup.
        outside: further things by name: globals, closure cells, the object that a step is bound to.
        keep: keeps a tensor's content and returns what gives it back; by default a copy on the CPU.

    Returns:
        The capture. Of the setup it keeps nothing alive but what iterators iterate over.
    """
    walk = Walk(keep)
    pieces = walk_setup(walk, setup, outside or {})
    order = {name: parameter_order(walk, optimizer) for name, optimizer in setup.optimizers.items()}
    return StateCapture(pieces, order, walk.uncopied, walk.nodes)


def walk_setup(walk: Walk, setup: TrainingSetup, outside: Mapping[str, Any]) -> dict[Piece, Node]:
    """Walk through a whole setup, and make a node of each piece."""
    pieces: dict[Piece, Node] = {}
    walk.meet(setup, "setup")
    walk.meet(setup.state, "setup.state")
    walk.meet(setup.model, "model")
    for name, optimizer in setup.optimizers.items():
        walk.meet(optimizer, f"setup.optimizers[{name!r}]")
    for name, scheduler in setup.schedulers.items():
        walk.meet(scheduler, f"setup.schedulers[{name!r}]")
    for name, entry in setup.state.items():
        walk.meet(entry, f"setup.state[{name!r}]")
    module = walk.node(setup.model, "model")
    assert isinstance(module, Container)
    pieces[Piece("weights")] = module.items["weights"]
    pieces[Piece("trainable")] = module.items["trainable"]
    pieces[Piece("modes")] = module.items["modes"]
    pieces[Piece("module attributes")] = module.items["attributes"]
    for name, optimizer in setup.optimizers.items():
        _capture_optimizer(walk, pieces, name, optimizer)
    for name, scheduler in setup.schedulers.items():
        pieces[Piece("scheduler", name)] = walk.node(scheduler, f"setup.schedulers[{name!r}]")
    if setup.scaler is not None:
        pieces[Piece("scaler")] = walk.node(setup.scaler, "setup.scaler")
    for name, entry in setup.state.items():
        pieces[Piece("state", name)] = walk.node(entry, f"setup.state[{name!r}]")
    for name, value in vars(setup).items():
        if name not in _SETUP_PARTS:
            pieces[Piece("attribute", name)] = walk.node(value, f"setup.{name}")
    for name, value in outside.items():
        pieces[Piece("outside", name)] = walk.node(value, name)
    pieces[Piece("gradients")] = _gradients(walk, setup)
    pieces.update({Piece("rng", name): node for name, node in _rng().items()})
    return pieces


def capture_outside(outside: Mapping[str, Any], *, keep: Keep = keep_in_memory) -> StateCapture:
    """Capture things that belong to no setup, by name, as ``capture_state`` does."""
    walk = Walk(keep)
    pieces = {Piece("outside", name): walk.node(value, name) for name, value in outside.items()}
    return StateCapture(pieces, {}, walk.uncopied, walk.nodes)


def _capture_optimizer(walk: Walk, pieces: dict[Piece, Node], name: str, optimizer: Any) -> None:
    path = f"setup.optimizers[{name!r}]"
    walk.meet(optimizer.param_groups, f"{path}.param_groups")
    groups = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        place = f"{path}.param_groups[{index}]"
        held = {key: walk.node(value, f"{place}[{key!r}]") for key, value in options.items()}
        groups[index] = Container("dict", dict, held)
    pieces[Piece("param groups", name)] = Container("groups", list, groups)
    state = getattr(optimizer, "state", None)
    if isinstance(state, dict):
        walk.meet(state, f"{path}.state")
        held = {key: walk.node(values, f"{path}.state[{key}]") for key, values in named_state(optimizer, walk).items()}
        pieces[Piece("optimizer state", name)] = Container("by parameter", dict, held)
    if not is_library(type(optimizer)):
        own = optimizer_attributes(optimizer)
        held = {key: walk.node(value, f"{path}.{key}") for key, value in own.items()}
        pieces[Piece("optimizer attributes", name)] = Container("optimizer attributes", type(optimizer), held)


def optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return what the person's own optimizer has beside its state and groups; nothing for a library's."""
    if is_library(type(optimizer)):
        return {}
    return {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_PARTS}


def named_parameters(optimizer: Any, walk: Walk) -> dict[str, Tensor]:
    """Name an optimizer's parameters: as the walk met them, else by their place in its groups."""
    named: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            met = walk.knows(parameter)
            named[met.removeprefix("model.") if met else f"param_groups[{index}]['params'][{position}]"] = parameter
    return named


def named_state(optimizer: Any, walk: Walk) -> dict[Any, Any]:
    """Return an optimizer's state by the names of its parameters; keys that are no parameters stay what they are.

    State of a parameter that has left the groups, and that the walk has not met, is left out: no step reads it.
    """
    names = {id(parameter): name for name, parameter in named_parameters(optimizer, walk).items()}
    state = {}
    for key, values in list(optimizer.state.items()):
        name = key if is_plain(key) else names.get(id(key), (walk.knows(key) or "").removeprefix("model."))
        if name != "":
            state[name] = values
    return state


def parameter_order(walk: Walk, optimizer: Any) -> list[list[str]]:
    """List the names of an optimizer's parameters, group by group."""
    names = {id(parameter): name for name, parameter in named_parameters(optimizer, walk).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _gradients(walk: Walk, setup: TrainingSetup) -> Node:
    held: dict[Any, Node] = {}
    for name, tensor in module_tensors(setup.model).items():
        if tensor.grad is not None:
            held[name] = walk.node(tensor.grad, f"model.{name}.grad")
    return Container("gradients", dict, held)


def numpy_generator() -> Any:
    """Return the generator behind numpy's global functions; None where numpy was not imported."""
    numpy = sys.modules.get("numpy")
    return numpy.random.mtrand._rand if numpy is not None and hasattr(numpy, "random") else None


def _rng() -> dict[str, Node]:
    states: dict[str, Node] = {"python": Plain(random.getstate())}
    if (generator := numpy_generator()) is not None:
        states["numpy"] = capture_generator(generator)
    states["torch"] = Plain(bytes(torch.get_rng_state().tolist()))
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            for index, state in enumerate(module.get_rng_state_all()):
                states[f"{kind}:{index}"] = Plain(bytes(state.tolist()))
    return states
