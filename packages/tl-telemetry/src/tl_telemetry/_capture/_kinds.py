"""What kind of thing an object is, for the capture: state, something that holds state, or neither."""

from __future__ import annotations

import copy
import enum
import itertools
import random
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch

IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    range,
    slice,
    enum.Enum,
    PurePath,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_LIBRARY_FOLDERS = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_DATA: tuple[Any, ...] = ([], (), range(0), range(1 << 70), {}, {}.values(), {}.items(), set(), "", b"")
_COPYABLE: tuple[type, ...] = (
    *(type(iter(made)) for made in _DATA),
    *(zip, map, filter, enumerate, reversed, type(reversed([]))),
    *(value for value in vars(itertools).values() if isinstance(value, type)),
)


def is_library(cls: type) -> bool:
    """Tell whether a class comes from the standard library or an installed package, not from the person's own code."""
    return _from_library(cls.__module__)


@lru_cache(maxsize=4096)
def _from_library(module_name: str) -> bool:
    top = module_name.partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top in ("torch", "numpy"):
        return True
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    return file.startswith(_LIBRARY_FOLDERS) or "site-packages" in file or "dist-packages" in file


def is_stateful(value: Any) -> bool:
    """Tell whether an object says itself what its state is."""
    cls = type(value)
    return callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None))


def generator_kind(value: Any) -> str | None:
    """Return what kind of random number generator a value is; None for anything else."""
    if isinstance(value, torch.Generator):
        return "torch.Generator"
    if isinstance(value, random.Random):
        return "random.Random"
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        if isinstance(value, numpy.random.Generator):
            return "numpy.random.Generator"
        if isinstance(value, numpy.random.RandomState):
            return "numpy.random.RandomState"
    return None


def generator_state(value: Any) -> Any:
    """Return a copy of a generator's state, made of plain values."""
    kind = generator_kind(value)
    if kind == "torch.Generator":
        return value.get_state()
    if kind == "random.Random":
        return value.getstate()
    bits = value.bit_generator if kind == "numpy.random.Generator" else value._bit_generator
    return _frozen(bits.state)


def set_generator_state(value: Any, state: Any) -> None:
    """Put a generator back."""
    kind = generator_kind(value)
    if kind == "torch.Generator":
        value.set_state(state)
    elif kind == "random.Random":
        value.setstate(state)
    elif kind == "numpy.random.Generator":
        value.bit_generator.state = _thawed(state)
    else:
        value._bit_generator.state = _thawed(state)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return ("array", value.dtype.str, tuple(value.tolist())) if hasattr(value, "tolist") else value


def _thawed(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if value and value[0] == "array":
        return sys.modules["numpy"].array(value[2], dtype=value[1])
    return {key: _thawed(item) for key, item in value}


def is_array(value: Any) -> bool:
    """Tell whether a value is a numpy array or scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator)


def cursor(value: Iterator[Any]) -> tuple[Any, Any]:
    """Return where an iterator stands and a copy of it, which shares the data below; None for what cannot be had."""
    yielded = getattr(value, "_num_yielded", None)  # an iterator of a DataLoader
    if isinstance(yielded, int):
        return yielded, None
    try:
        data: dict[int, Any] = {}
        position = _position(value, data)
        return position, copy.deepcopy(value, data)
    except (TypeError, _NoCopyError):  # among others, Python 3.14 cannot copy itertools
        return None, None


class _NoCopyError(Exception):
    """An iterator that a copy would go on sharing."""


def _position(value: Any, data: dict[int, Any]) -> Any:
    """Read where an iterator stands from how it would be pickled: its counters, and those of the iterators below it.

    What it iterates over is gathered in ``data``, by id, so that a deep copy leaves that alone.
    """
    if not isinstance(value, _COPYABLE):
        raise _NoCopyError
    reduced: tuple[Any, ...] = tuple(value.__reduce__())
    function, parts = reduced[0], []
    for part in (*reduced[1], *reduced[2:]):
        if isinstance(part, Iterator):
            parts.append(_position(part, data))
        elif all(isinstance(item, (int, float, type(None))) for item in (part if isinstance(part, tuple) else [part])):
            parts.append(part)
        else:
            data[id(part)] = part
            parts.append(len(part) if hasattr(part, "__len__") else None)
    return (getattr(function, "__name__", ""), *parts)
