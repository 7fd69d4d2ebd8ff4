"""Iterators: where they stand, and copies that go on from there and share the data below."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

from tl_telemetry._capture._kinds import is_library
from tl_telemetry._capture._nodes import Cursor

_DATA: tuple[Any, ...] = ([], (), range(0), range(1 << 70), set(), "", b"")
_DICTS: tuple[Any, ...] = ({}, {}.values(), {}.items())
# These are pickled as a fresh list of what is left, as those over sets are.
_SNAPSHOTS: tuple[type, ...] = (*(type(iter(made)) for made in _DICTS), type(iter(set())))
_COPYABLE: tuple[type, ...] = (
    *_SNAPSHOTS,
    *(type(iter(made)) for made in _DATA),
    *(zip, map, filter, enumerate, reversed, type(reversed([]))),
    *(value for value in vars(itertools).values() if isinstance(value, type)),
)


def is_iterator(value: Any) -> bool:
    """Tell whether a value is a library's iterator, no file; one of the person's own is an object like others."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase) and is_library(type(value))


def capture_iterator(value: Iterator[Any]) -> Cursor:
    """Make a node of an iterator; without a copy where none can be had, and a position where nothing tells it."""
    kind = type(value).__name__
    if isinstance(yielded := getattr(value, "_num_yielded", None), int):  # an iterator of a DataLoader
        return Cursor(kind, yielded, None)
    try:
        shared: dict[int, Any] = {}
        position = _position(value, shared)
        return Cursor(kind, position, copy.deepcopy(value, shared))
    except (TypeError, _NoCopyError):  # among others, Python 3.14 cannot copy itertools
        return Cursor(kind, None, None)


def copy_iterator(value: Iterator[Any]) -> Iterator[Any]:
    """Copy an iterator that was copied before."""
    shared: dict[int, Any] = {}
    _position(value, shared)
    return copy.deepcopy(value, shared)


class _NoCopyError(Exception):
    """An iterator that a copy would go on sharing."""


def _position(value: Any, shared: dict[int, Any]) -> Any:
    """Read where an iterator stands from how it would be pickled: its counters, and those of the iterators below it.

    What it iterates over is gathered in ``shared``, by id, so that a deep copy leaves that alone.
    """
    if not isinstance(value, _COPYABLE):
        raise _NoCopyError
    reduced: tuple[Any, ...] = tuple(value.__reduce__())
    function, arguments, *state = reduced
    if isinstance(value, _SNAPSHOTS):
        for item in arguments[0]:
            _share(item, shared)
            for part in item if isinstance(item, tuple) else ():
                _share(part, shared)
    below = [_argument(part, shared) for part in arguments]
    return (function.__name__, *below, *(_state(part, shared) for part in state))


def _argument(part: Any, shared: dict[int, Any]) -> Any:
    """Share an argument, unless it holds iterators, as the tuple does that ``chain`` walks through."""
    if isinstance(part, Iterator):
        return _position(part, shared)
    if part is None or isinstance(part, (int, float)):
        return part
    if isinstance(part, (list, tuple)) and any(isinstance(item, Iterator) for item in part):
        return ("of", *(_argument(item, shared) for item in part))
    return _share(part, shared)


def _state(part: Any, shared: dict[int, Any]) -> Any:
    """Read what an iterator keeps beside its arguments. A list there grows (that of ``cycle``): a copy has its own."""
    if isinstance(part, tuple):
        return tuple(_state(item, shared) for item in part)
    if isinstance(part, list):
        for item in part:
            _share(item, shared)
        return len(part)
    return _argument(part, shared)


def _share(part: Any, shared: dict[int, Any]) -> int | None:
    shared[id(part)] = part
    if isinstance(part, range):  # len() refuses huge ones
        return max(0, -((part.start - part.stop) // part.step))
    return len(part) if isinstance(part, (list, tuple, str, bytes)) else None


def same_position(a: Any, b: Any) -> bool:
    """Tell whether two iterators stand at one place.

    An iterator over a dict or set is copied to one over the list of what is left, so that is what counts for those.
    """
    if not (isinstance(a, tuple) and isinstance(b, tuple)):
        return bool(a == b)
    if a[:1] == b[:1] == ("iter",) and len(a) != len(b):
        return _left(a) == _left(b)
    return len(a) == len(b) and all(same_position(x, y) for x, y in zip(a, b, strict=True))


def _left(position: tuple[Any, ...]) -> int:
    return int(position[1]) - int(position[2] or 0) if len(position) == 3 else int(position[1])


def described_position(position: Any) -> str:
    """Say where an iterator stands: the item of a sequence, or the counters of the iterators that it is made of."""
    if isinstance(position, int):
        return f"item {position}"
    if not position:
        return "an unknown place"
    if position[0] == "iter" and len(position) == 3 and position[2] is not None:
        return f"item {position[2]} of {position[1]}"
    if position[0] == "iter":
        return f"{position[1]} items before its end" if position[1] else "its end"
    inner = [part for part in position if isinstance(part, tuple)]
    if not inner:
        return f"{position[-1]}"
    return described_position(inner[0] if isinstance(position[0], str) else inner[-1])  # of a chain, the current one
