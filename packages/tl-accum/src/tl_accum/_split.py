"""Batches, cut into micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split a batch along the first dimension of its tensors into parts of equal size.

    Dicts, lists, tuples, named tuples and dataclasses are taken apart, whatever their nesting. A list with one element
    an example (captions, the target dicts of a detector) is split as well. What has no examples (numbers, strings,
    0-dim tensors) goes into every part as it is.

    Args:
        batch: the batch: tensors or numpy arrays of shape (num_examples, ...), in any containers.
        parts: how many parts; must divide num_examples.

    Returns:
        The parts, in order; tensors are views of the batch's.

    Raises:
        TypeError: ``parts`` is no int, or the batch holds nothing that can be split.
        ValueError: ``parts`` is less than 1, or does not divide num_examples, or tensors differ in their first
            dimension.

    Example:
        >>> split_batch({"ids": torch.arange(4), "scale": 0.5}, 2)
        [{'ids': tensor([0, 1]), 'scale': 0.5}, {'ids': tensor([2, 3]), 'scale': 0.5}]
    """
    if isinstance(parts, bool) or not isinstance(parts, int):
        raise TypeError(f"parts must be an int, got {type(parts).__name__} {parts!r}")
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    examples = num_examples(batch)
    if examples % parts:
        raise ValueError(
            f"a batch of {examples} examples cannot be split into {parts} micro-batches of equal size: use a batch "
            f"size that {parts} divides, or pass split="
        )
    size = examples // parts
    return [rows(batch, part * size, (part + 1) * size, examples) for part in range(parts)]


def num_examples(batch: Any) -> int:
    """Return the number of examples in a batch: the first dimension of its tensors, which must be one for all."""
    found = list(_lengths(batch, "batch", columns=True))
    if not found:
        raise TypeError(
            f"the batch ({_described(batch)}) holds no tensor, array or list with one element an example: pass split="
        )
    if len({length for _, length in found}) > 1:
        # tensors of one first dimension in a list may be examples too: images of 3 channels
        other = list(_lengths(batch, "batch", columns=False))
        if len({length for _, length in other}) == 1:
            found = other
    name, first = found[0]
    for another, length in found[1:]:
        if length != first:
            raise ValueError(
                f"{another} has {length} rows and {name} has {first}: the batch is not split along the first dimension "
                "alone; pass split="
            )
    return first


def rows(batch: Any, start: int, stop: int, examples: int) -> Any:
    """Return examples ``start`` to ``stop - 1`` of a batch that holds ``examples``."""

    def is_examples(value: list[Any]) -> bool:
        return len(value) == examples and any(length != examples for length in _column_lengths(value) or [None])

    return _mapped(batch, lambda leaf: leaf[start:stop], is_examples)


def _lengths(value: Any, name: str, *, columns: bool) -> Iterator[tuple[str, int]]:
    """Yield the number of examples that each leaf seems to hold.

    Args:
        value: the batch, or a part of it.
        name: its name in messages.
        columns: whether a list whose tensors share their first dimension is a container, as a DataLoader collates
            ``[x, y]``; else it has one element an example.
    """
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_nested or value.layout is not torch.strided:
            raise TypeError(f"{name} is a {_layout(value)} tensor, which split_batch cannot split: pass split=")
        if value.dim():
            yield name, value.shape[0]
    elif _is_array(value):
        if value.ndim:
            yield name, value.shape[0]
    elif isinstance(value, list) and value and not (len(_column_lengths(value)) == 1 and (columns or name == "batch")):
        yield name, len(value)
    else:
        for key, item in _items(value):
            yield from _lengths(item, f"{name}{key}", columns=columns)


def _column_lengths(values: list[Any]) -> set[int]:
    """Return the numbers of examples that a list's elements would hold, were they columns."""
    if all(isinstance(value, _PLAIN) for value in values):
        return set()
    return {length for value in values for _, length in _lengths(value, "", columns=True)}


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{key}", item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def _mapped(value: Any, cut: Callable[[Any], Any], is_examples: Callable[[list[Any]], bool]) -> Any:
    """Rebuild a batch with every leaf that has examples cut."""
    if isinstance(value, Tensor) or _is_array(value):
        return cut(value) if value.ndim else value
    made: Any
    if isinstance(value, Mapping):
        items = {key: _mapped(item, cut, is_examples) for key, item in value.items()}
        if type(value) is dict:
            return items
        made = copy.copy(value)  # a library's own mapping (a BatchEncoding) keeps what else it holds
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(value, list) and is_examples(value):
        return cut(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, cut, is_examples) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, cut, is_examples) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), cut, is_examples))
        return made
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _layout(value: Tensor) -> str:
    return "nested" if value.is_nested else str(value.layout).removeprefix("torch.")


def _described(batch: Any) -> str:
    return f"{'an' if type(batch).__name__[0] in 'aeiouAEIOU' else 'a'} {type(batch).__name__}"
