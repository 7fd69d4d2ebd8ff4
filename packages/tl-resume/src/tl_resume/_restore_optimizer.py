"""Putting the state of an optimizer back, by parameter name and in the dtypes that were saved."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_resume._fit import has_named_groups
from tl_resume._format import StateFile, TensorEntry
from tl_resume._state import parameters_by_index
from tl_resume._undo import Journal


def restore_optimizer(
    optimizer: Any, keys: tuple[str, str], saved: Any, file: StateFile, names: dict[int, str], journal: Journal
) -> None:
    """Load an optimizer's state; its tensors go to the devices of their parameters one after the other.

    Args:
        optimizer: The optimizer.
        keys: Where in the file its state is.
        saved: The skeleton of that state.
        file: The file.
        names: The names of the parameters by id.
        journal: Remembers how to take it back.
    """
    current = optimizer.state_dict()
    by_index = parameters_by_index(optimizer, current)
    if by_index is None or not has_named_groups(saved):
        journal.load(optimizer, file.part(*keys))
        return
    index_of = {names[id(tensor)]: index for index, tensor in by_index.items()}

    ready: dict[str, Tensor] = {}
    if all(tensor.device.type == "cpu" for tensor in by_index.values()):
        ready = file.read_many(_whole_tensors(saved["state"]))
    states: dict[Any, Any] = {}
    for name in saved["state"]:
        place = partial(_device, by_index.get(index_of.get(name, -1)))
        states[index_of.get(name, name)] = file.part(*keys, "state", name, device=place, ready=ready)
    groups = []
    for group, live in zip(file.part(*keys, "param_groups"), current["param_groups"], strict=True):
        loaded = {**group, "params": live["params"]}
        if "param_names" in live:  # in the order of this optimizer's parameters
            loaded["param_names"] = live["param_names"]
        groups.append(loaded)
    rest = {key: file.part(*keys, key) for key in saved if key not in ("state", "param_groups")}
    attributes, old_groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    old_states = {parameter: dict(state) for parameter, state in optimizer.state.items() if isinstance(state, dict)}
    journal.add(lambda: _put_back(optimizer, attributes, old_groups, old_states))
    optimizer.load_state_dict({**rest, "state": states, "param_groups": groups})
    for index, tensor in by_index.items():
        if index in states and isinstance(optimizer.state.get(tensor), dict):
            # load_state_dict casts to the parameter's dtype: moments kept in float32 would lose their digits
            optimizer.state[tensor] = _exact(optimizer.state[tensor], states[index])


def _whole_tensors(saved: Any) -> list[str]:
    """Return the names of the tensors in a skeleton that are stored by themselves."""
    if isinstance(saved, TensorEntry):
        return [saved.name] if saved.kind == "tensor" and saved.whole else []
    inner = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, tuple)) else ()
    return list(dict.fromkeys(name for item in inner for name in _whole_tensors(item)))


def restore_hyperparameters(optimizer: Any, keys: tuple[str, str], saved: Any, file: StateFile) -> None:
    """Set learning rates and the like as saved, whatever a scheduler has made of them while it was loaded."""
    if not has_named_groups(saved):
        return
    for group, loaded in zip(optimizer.param_groups, file.part(*keys, "param_groups", verify=False), strict=True):
        for key, value in loaded.items():
            if key in ("params", "param_names"):
                continue
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                value = value.to(current.device)
            group[key] = value


def _device(parameter: Tensor | None, entry: TensorEntry) -> str | torch.device:
    # single numbers (Adam's step) are moved by load_state_dict where the optimizer wants them on the device
    return parameter.device if parameter is not None and entry.shape else "cpu"


def _exact(loaded: Any, saved: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, type(loaded)) and len(loaded) == len(saved):
        return type(loaded)(_exact(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


def _put_back(optimizer: Any, attributes: dict[str, Any], groups: list[Any], states: dict[Any, Any]) -> None:
    vars(optimizer).clear()
    vars(optimizer).update(attributes)
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(old)
    optimizer.state.clear()
    optimizer.state.update(states)
