"""Optimizer state by parameter name: what torch saves by index is named where the names can be established."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# BatchNorm's buffers stand in a model's state dict between its parameters.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_optimizer(value: Any) -> bool:
    """Say whether a value is what an optimizer's ``state_dict()`` gives."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) and _is_keys(group.get("params")) for group in value["param_groups"])
    )


def _is_keys(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(key, (int, str)) for key in value)


def is_by_index(optimizer: Mapping[str, Any]) -> bool:
    """Say whether an optimizer's state goes by the parameters' positions, not by names."""
    return any(isinstance(key, int) for group in optimizer["param_groups"] for key in group["params"])


def own_names(optimizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the names that an optimizer built from named parameters keeps in its groups; by index."""
    names: dict[int, str] = {}
    for group in optimizer["param_groups"]:
        given = group.get("param_names")
        if given is None or not _is_keys(given) or len(given) != len(group["params"]):
            return {}
        names.update(zip(group["params"], given, strict=True))
    return names if len(set(names.values())) == len(names) else {}


def names_from_model(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[int, str]:
    """Name an optimizer's parameters after those of a model state dict, if order, number and shapes agree.

    Two orders are tried: the model's own, and matrices before vectors, as two groups for weight decay are made.

    Args:
        optimizer: An optimizer's state dict, by index.
        model: A model's state dict in the order that the model gave it.

    Returns:
        The names by index; empty where no order fits, or no state tells a shape.
    """
    indices = [index for group in optimizer["param_groups"] for index in group["params"]]
    names = [name for name in _without_aliases(model) if name.rpartition(".")[2] not in _BUFFERS]
    orders = [names]
    if len(optimizer["param_groups"]) > 1:
        orders.append(sorted(names, key=lambda name: len(model[name].shape) < 2))
    for order in orders:
        if len(order) == len(indices) and len(set(indices)) == len(indices):
            proposed = dict(zip(indices, order, strict=True))
            shapes = {name: tuple(model[name].shape) for name in order}
            if _fits(optimizer, proposed, shapes):
                return proposed
    return {}


def names_from_other(optimizer: Mapping[str, Any], other: Mapping[str, Any]) -> dict[int, str]:
    """Name parameters after those at the same positions of another optimizer's groups, if their state's shapes agree.

    Args:
        optimizer: An optimizer's state dict, by index.
        other: The state dict of the other side, by name.
    """
    groups, named = optimizer["param_groups"], other["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in named]:
        return {}
    pairs = [zip(x["params"], y["params"], strict=True) for x, y in zip(groups, named, strict=True)]
    proposed = {index: name for pair in pairs for index, name in pair}
    shapes = {name: shape for name, state in other["state"].items() for shape in _shapes(state)}
    return proposed if _fits(optimizer, proposed, shapes) else {}


def _without_aliases(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a model's tensors, of tied ones the first only: an optimizer holds them once."""
    seen = set()
    for name, tensor in model.items():
        # a sparse tensor has no memory of its own, only its parts have
        pointer = tensor.data_ptr() if getattr(tensor, "layout", None) is torch.strided else None
        place = (pointer, tuple(tensor.shape)) if pointer else name
        if place not in seen:
            seen.add(place)
            yield name


def _shapes(state: Any) -> list[tuple[int, ...]]:
    """List the shapes of one parameter's state tensors; scalars such as ``step`` say nothing."""
    if not isinstance(state, Mapping):
        return []
    shapes = [tuple(value.shape) for value in state.values() if hasattr(value, "shape")]
    return [shape for shape in shapes if shape]


def _fits(optimizer: Mapping[str, Any], names: dict[int, str], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Say whether each state has the shape of its parameter, and at least one told."""
    told = False
    for index, state in optimizer["state"].items():
        name = names.get(index)
        for shape in _shapes(state):
            if name is None or shapes.get(name, shape) != shape:
                return False
            told = True
    return told


def renamed(optimizer: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state dict with names for indices; ``parameter 3`` where there is no name."""

    def name(key: Any) -> Any:
        return names.get(key, f"parameter {key}") if isinstance(key, int) else key

    groups = [{**group, "params": [name(key) for key in group["params"]]} for group in optimizer["param_groups"]]
    return {
        **optimizer,
        "state": {name(key): state for key, state in optimizer["state"].items()},
        "param_groups": groups,
    }
