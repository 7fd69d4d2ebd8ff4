"""Gives an object, in place, what another one of its kind holds."""

from __future__ import annotations

import enum
import random
from collections import deque
from typing import Any

import torch

_PLAIN = (
    type(None),
    type(...),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_immutable(value: Any) -> bool:
    """Tell whether nothing can change inside of a value; a plain ``object()``, as sentinels are, is such a value."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_immutable(one) for one in value)
    return isinstance(value, _PLAIN) or type(value) is object


def refill(target: Any, source: Any) -> None:
    """Make an object hold what another one of the same type holds; the object stays the same.

    Args:
        target: The object to change.
        source: What to take over: attributes, slots and, of builtin containers, the elements.
    """
    if target is source:
        return
    if isinstance(target, (list, deque)):
        elements = list(source)
        target.clear()
        target.extend(elements)
    elif isinstance(target, (dict, set)):
        content = source.copy()
        target.clear()
        target.update(content)
    elif isinstance(target, random.Random):
        target.setstate(source.getstate())
    for cls in type(target).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                _copy_slot(cls.__dict__[_mangled(cls, slot)], target, source)
    if hasattr(target, "__dict__"):
        attributes = dict(vars(source))
        vars(target).clear()
        vars(target).update(attributes)


def _copy_slot(slot: Any, target: Any, source: Any) -> None:
    try:
        slot.__set__(target, slot.__get__(source))
    except AttributeError:  # not set in the source
        if hasattr(target, slot.__name__):
            slot.__delete__(target)


def _mangled(cls: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name
