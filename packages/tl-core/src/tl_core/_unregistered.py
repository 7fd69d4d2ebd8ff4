"""Tensors that modules train without torch knowing them as Parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor, nn

from tl_core._names import module_names, parameter_names

# Where torch registers things; what lies there is no plain attribute.
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
# Containers in containers that are looked into, and items of each: a module may keep a long history of other things.
_DEPTH = 3
_MAX_ITEMS = 256


def unregistered_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name the leaf tensors with ``requires_grad`` that modules keep in plain attributes, lists, tuples or dicts.

    ``model.parameters()`` does not give them: torch registers only a ``Parameter`` that is an attribute of a module, or
    in an ``nn.ParameterList`` or ``nn.ParameterDict``.

    Args:
        model: The model, wrapped or not.

    Returns:
        The tensors by the place where they are kept (``encoder.prompts[0]``), each once.
    """
    seen = set(map(id, parameter_names(model).values()))
    found: dict[str, Tensor] = {}
    for prefix, module in module_names(model).items():
        for attribute, value in vars(module).items():
            if attribute in _REGISTRIES:
                continue
            place = f"{prefix}.{attribute}" if prefix else attribute
            for name, tensor in _tensors(place, value, _DEPTH):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[name] = tensor
    return found


def _tensors(place: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield place, value
        return
    if not depth or not isinstance(value, (list, tuple, dict)):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in islice(items, _MAX_ITEMS):
        yield from _tensors(f"{place}[{key!r}]", item, depth - 1)
