"""What a Trainer of the person's own class keeps in attributes of its own."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from tl_core import TrainingSetup
from tl_telemetry import is_own_class


def pull(trainer: Trainer, attributes: dict[str, Any]) -> None:
    """Bring a dict up to the attributes that the person's class gives its Trainer.

    The Trainer itself holds everything there is, the data and the libraries' bookkeeping too: what is captured and put
    back is this dict.
    """
    attributes.clear()
    attributes.update({name: vars(trainer)[name] for name in _own_names(trainer)})


def push(trainer: Trainer, attributes: dict[str, Any]) -> None:
    """Give a Trainer what was put back into the dict."""
    for name, value in attributes.items():
        if vars(trainer).get(name) is not value:
            setattr(trainer, name, value)


def show(trainer: Trainer, setup: TrainingSetup) -> None:
    """Let a setup have what the person's code gives its Trainer and training may change: modules, averages.

    They are its attributes ``trainer.centers``, ``trainer.ema``.
    """
    for name in _own_names(trainer):
        value = vars(trainer)[name]
        if _is_state(value):
            setattr(setup, _SHOWN + name, value)


def give_back(setup: TrainingSetup, trainer: Trainer) -> None:
    """Give a Trainer what a setup shows of it, which may have been put back to an earlier moment."""
    shown = {name.removeprefix(_SHOWN): value for name, value in vars(setup).items() if name.startswith(_SHOWN)}
    for name in _own_names(trainer):
        if name not in shown and _is_state(vars(trainer)[name]):
            delattr(trainer, name)  # it was not there yet
    push(trainer, shown)


_SHOWN = "trainer."


def _is_state(value: Any) -> bool:
    """Tell whether something is a module that trains, holds tensors, or is an object of the person's own with some."""
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    if isinstance(value, (Mapping, list, tuple)):
        parts = list(value.values() if isinstance(value, Mapping) else value)
        return bool(parts) and all(isinstance(part, Tensor) for part in parts)
    if not is_own_class(type(value)):
        return False
    return any(
        isinstance(held, Tensor) or (isinstance(held, (nn.Module, Mapping, list, tuple)) and _is_state(held))
        for held in getattr(value, "__dict__", {}).values()
    )


def has_own_attributes(trainer: Trainer) -> bool:
    """Tell whether a Trainer is of the person's own class."""
    return any(is_own_class(cls) for cls in type(trainer).__mro__)


def _own_names(trainer: Trainer) -> list[str]:
    kind: Any = type(trainer)
    known = _names_of_libraries(kind)
    return [name for name in vars(trainer) if name not in known and not callable(getattr(type(trainer), name, None))]


@functools.lru_cache(maxsize=64)
def _names_of_libraries(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the libraries' classes give an object."""
    functions = (
        function
        for cls in kind.__mro__
        if not is_own_class(cls)
        for function in vars(cls).values()
        if isinstance(function, types.FunctionType)
    )
    return frozenset(name for function in functions for name in _stored(function.__code__))


def _stored(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _stored(constant)
