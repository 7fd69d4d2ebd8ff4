"""Attributes of objects, read and written past properties, ``__getattr__`` and ``__setattr__``."""

from __future__ import annotations

import types
from typing import Any


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds, in ``__dict__`` and in slots (under the names that Python gives private ones)."""
    held = dict(_dict_of(value))
    for name, slot in _slots(type(value)).items():
        try:
            held[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return held


def set_attribute(value: Any, name: str, new: Any) -> None:
    """Set an attribute of an object, of a frozen one too."""
    slot = _slots(type(value)).get(name)
    if slot is not None:
        slot.__set__(value, new)
    else:
        _dict_of(value)[name] = new


def delete_attribute(value: Any, name: str) -> None:
    """Delete an attribute of an object, of a frozen one too."""
    slot = _slots(type(value)).get(name)
    if slot is not None:
        slot.__delete__(value)
    else:
        del _dict_of(value)[name]


def blank(cls: type) -> Any:
    """Make an object of a class without calling its ``__init__``.

    Raises:
        TypeError: the class makes its objects itself, and needs arguments for it.
    """
    try:
        return object.__new__(cls)
    except TypeError:  # below an exception, or another type of C's
        made: Any = cls
        return made.__new__(made)


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # only slots, or nothing
        held = {}
    return held


def _slots(cls: type) -> dict[str, Any]:
    return {
        name: member
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }
