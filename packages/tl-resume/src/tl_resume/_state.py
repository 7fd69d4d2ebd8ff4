"""The training state of a setup, gathered in one nested dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_resume._format._encode import encode_state
from tl_resume._generators import find_generators, generator_state, global_states, is_generator
from tl_resume._iterators import is_stateful, made_iterators, own_entries
from tl_resume._model_names import attributes, clean_keys, module_modes, stray_tensors, trained_tensors

SECTIONS = (
    "model",
    "optimizers",
    "schedulers",
    "scaler",
    "state",
    "attributes",
    "iterators",
    "parameters",
    "generators",
    "rng",
    "modes",
    "gradients",
    "classes",
    "step_index",
)


def training_state(setup: TrainingSetup) -> dict[str, Any]:
    """Gather all that a run needs to go on from here.

    The tensors are the live ones, not copies: what is kept must be saved, or copied, before the next step.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state = training_state(setup)
        >>> list(state["model"]), state["optimizers"]["optimizer"]["param_groups"][0]["params"]
        (['weight', 'bias'], ['weight', 'bias'])

    Args:
        setup: The setup.

    Returns:
        A dict with the keys

        - ``model``: its ``state_dict()`` under the names of the model's author, as uncompiled and unwrapped,
        - ``optimizers``: by name, ``state_dict()`` with parameters by name: ``encoder.weight`` of the model,
          ``state.criterion.weight`` of ``setup.state``, ``setup.head.weight`` of an attribute, else its position,
          ``optimizer#3``; of an optimizer whose ``state_dict()`` has another layout, that as it is,
        - ``schedulers``, ``scaler``: their ``state_dict()`` by name; None without a scaler,
        - ``state``: the entries of ``setup.state``: ``state_dict()``, else plain data as it is,
        - ``attributes``: attributes set on the setup that are plain data or have ``state_dict()`` and
          ``load_state_dict()``. All others are passed over in silence: functions, datasets, loggers, but also an object
          that holds training state. Give such an object ``state_dict()`` and ``load_state_dict()``,
        - ``iterators``: which entries and attributes are iterators of a torchdata ``StatefulDataLoader`` that is one
          itself: their position is in its state, and they are made by it anew after that is loaded,
        - ``parameters``: tensors that an optimizer trains and that are nowhere else,
        - ``generators``: the states of random number generators that the setup holds, by place,
        - ``rng``: the states of the global ones: python, numpy (where imported), torch, initialised accelerators,
        - ``modes``: whether each module is in training mode,
        - ``gradients``: every ``.grad`` there is, as a cycle of accumulation needs them in its middle. A loop that
          zeroes at the start of a step leaves them behind: saving after ``optimizer.zero_grad()`` makes the file
          smaller,
        - ``classes``: the class names of optimizers, schedulers and other objects with a state,
        - ``step_index``.

    Raises:
        TypeError: A scheduler or an entry of ``setup.state`` is neither plain data nor has a ``state_dict()``.
    """
    if not isinstance(setup, TrainingSetup):
        raise TypeError(f"setup must be a TrainingSetup, got a {type(setup).__name__}")
    names = {id(tensor): name for name, tensor in trained_tensors(setup).items()}
    made = made_iterators(setup)  # before state_dict(), for which a loader that has none makes one
    return {
        "model": module_state(setup.model),
        "optimizers": {name: optimizer_state(optimizer, names) for name, optimizer in setup.optimizers.items()},
        "schedulers": {
            name: _state_dict(scheduler, f"the scheduler {name!r}") for name, scheduler in setup.schedulers.items()
        },
        "scaler": None if setup.scaler is None else _state_dict(setup.scaler, "the scaler"),
        "state": _entries(setup, names),
        "attributes": _attribute_states(setup, names),
        "iterators": made,
        "parameters": {name: tensor.detach() for name, tensor in stray_tensors(setup).items()},
        "generators": {place: generator_state(generator) for place, generator in find_generators(setup).items()},
        "rng": global_states(),
        "modes": {name: modules[-1].training for name, modules in setup_modules(setup).items()},
        "gradients": {
            name: tensor.grad.detach() for name, tensor in trained_tensors(setup).items() if tensor.grad is not None
        },
        "classes": {place: type(value).__name__ for place, value in stateful_objects(setup).items()},
        "step_index": setup.step_index,
    }


def stateful_objects(setup: TrainingSetup) -> dict[str, Any]:
    """List the objects of a setup, beside the model, that have a state of their own."""
    found = {f"optimizers[{name!r}]": value for name, value in setup.optimizers.items()}
    found |= {f"schedulers[{name!r}]": value for name, value in setup.schedulers.items()}
    found |= {f"state[{name!r}]": value for name, value in own_entries(setup).items() if is_stateful(value)}
    found |= {f"setup.{name}": value for name, value in attributes(setup).items() if is_stateful(value)}
    return found


def module_state(module: nn.Module) -> Any:
    """Take the ``state_dict()`` of a module under the author's names."""
    state = module.state_dict()
    if not has_torch_layout(module):
        return state
    return {name: state[key] for name, key in clean_keys(module, list(state)).items()}


def has_torch_layout(module: nn.Module) -> bool:
    """Tell whether a module saves and loads as torch's modules do, rather than by methods of its own."""
    kind = type(module)
    return kind.state_dict is nn.Module.state_dict and kind.load_state_dict is nn.Module.load_state_dict


def setup_modules(setup: TrainingSetup) -> dict[str, list[nn.Module]]:
    """List the modules of a setup by name: those of the model, of ``setup.state`` and of attributes."""
    found = module_modes(setup.model)
    for name, value in setup.state.items():
        if isinstance(value, nn.Module):
            found.update(module_modes(value, f"state[{name!r}]"))
    for name, value in attributes(setup).items():
        if isinstance(value, nn.Module):
            found.update(module_modes(value, f"setup.{name}"))
    return found


def optimizer_state(optimizer: Any, names: dict[int, str]) -> Any:
    """Take the ``state_dict()`` of an optimizer, parameters by name.

    Args:
        optimizer: The optimizer.
        names: The names of the parameters by id.

    Returns:
        The state, or ``state_dict()`` as it is where it has not the layout of torch's optimizers.
    """
    state = _state_dict(optimizer, f"the optimizer {type(optimizer).__name__}")
    by_index = parameters_by_index(optimizer, state)
    if by_index is None or any(id(tensor) not in names for tensor in by_index.values()):
        return state
    named = {index: names[id(tensor)] for index, tensor in by_index.items()}
    groups = [{**group, "params": [named[index] for index in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {named.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}


def parameters_by_index(optimizer: Any, state: Any) -> dict[int, Tensor] | None:
    """Match the indices of an optimizer's ``state_dict()`` with its parameters; None where the layout is another."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return None
    saved, live = state.get("param_groups"), optimizer.param_groups
    if not isinstance(saved, list) or len(saved) != len(live):
        return None
    matched: dict[int, Tensor] = {}
    for group, mine in zip(saved, live, strict=True):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return None
        if len(group["params"]) != len(mine["params"]) or not all(type(index) is int for index in group["params"]):
            return None
        matched.update(zip(group["params"], mine["params"], strict=True))
    return matched


def is_plain(value: Any) -> bool:
    """Tell whether a value can stand in a file as it is."""
    try:
        encode_state(value)
    except (TypeError, ValueError):
        return False
    return True


def object_state(value: Any, names: dict[int, str]) -> Any:
    """Take the state of an object that has one."""
    if isinstance(value, nn.Module):
        return module_state(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_state(value, names)
    return value.state_dict()


def _state_dict(value: Any, what: str) -> Any:
    if not is_stateful(value):
        raise TypeError(f"{what} is a {type(value).__name__} without state_dict() and load_state_dict(): add both")
    return value.state_dict()


def _entries(setup: TrainingSetup, names: dict[int, str]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, value in own_entries(setup).items():
        if is_generator(value):
            continue  # with the other generators
        if is_stateful(value):
            states[name] = object_state(value, names)
        elif is_plain(value):
            states[name] = value
        else:
            raise TypeError(
                f"state[{name!r}] is a {type(value).__name__} without state_dict() and load_state_dict(): "
                "add both, or keep it as an attribute of the setup if it is not training state"
            )
    return states


def _attribute_states(setup: TrainingSetup, names: dict[int, str]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, value in attributes(setup).items():
        if is_stateful(value):
            states[name] = object_state(value, names)
        elif not is_generator(value) and is_plain(value):
            states[name] = value
    return states
