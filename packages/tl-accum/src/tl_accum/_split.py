"""Batches, cut into micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_NUMBERS = (bool, int, float, complex, type(None))
_PLAIN = (str, bytes, *_NUMBERS)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split a batch along the first dimension of its tensors into parts of equal size.

    Dicts, lists, tuples, named tuples and dataclasses are taken apart, whatever their nesting. A list or tuple with one
    element an example (captions, the target dicts of a detector) is split as well. What has no examples (numbers,
    strings, 0-dim tensors) goes into every part as it is.

    Args:
        batch: the batch: tensors or numpy arrays of shape (num_examples, ...), in any containers.
        parts: how many parts; must divide num_examples.

    Returns:
        The parts, in order; tensors are views of the batch's.

    Raises:
        TypeError: ``parts`` is no int, or the batch holds nothing that can be split, or something that cannot be (a
            sparse or nested tensor, a packed sequence, an object of one's own that holds tensors).
        ValueError: ``parts`` is less than 1, or does not divide num_examples, or tensors differ in their first
            dimension, or it cannot be told what the examples are.

    Example:
        >>> split_batch({"ids": torch.arange(4), "scale": 0.5}, 2)
        [{'ids': tensor([0, 1]), 'scale': 0.5}, {'ids': tensor([2, 3]), 'scale': 0.5}]
    """
    if isinstance(parts, bool) or not isinstance(parts, int):
        raise TypeError(f"parts must be an int, got {type(parts).__name__} {parts!r}")
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    examples = num_examples(batch)
    if not examples:
        raise ValueError(f"the batch ({_described(batch)}) holds no examples: it cannot be split")
    if examples % parts:
        raise ValueError(
            f"a batch of {examples} examples cannot be split into {parts} micro-batches of equal size: use a batch "
            f"size that {parts} divides, or pass split="
        )
    size = examples // parts
    return [rows(batch, part * size, (part + 1) * size, examples) for part in range(parts)]


def num_examples(batch: Any) -> int:
    """Return the number of examples in a batch: the first dimension of its tensors, which must be one for all."""
    # a list of tensors with one first dimension may be columns, or one element an example: images of 3 channels
    columns, elements = (list(_lengths(batch, "batch", columns=reading)) for reading in (True, False))
    if not columns:
        raise TypeError(
            f"the batch ({_described(batch)}) holds no tensor, array or list with one element an example: pass split="
        )
    numbers = [{length for _, length in found} for found in (columns, elements)]
    if len(numbers[0]) == len(numbers[1]) == 1 and numbers[0] != numbers[1]:
        name = next(b for a, b in zip(columns, [name for name, _ in elements], strict=False) if a[0] != b)
        raise _ambiguous(name, numbers[1].pop(), numbers[0].pop())
    found = elements if len(numbers[1]) == 1 else columns
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

    def cut(leaf: Any) -> Any:
        part = leaf[start:stop]
        # a leaf of its own, as the batch is one
        return part.detach().requires_grad_() if isinstance(part, Tensor) and leaf.requires_grad else part

    def is_examples(value: Any, name: str) -> bool:
        if len(value) != examples or not _has_elements(value, top=name == "batch", columns=False):
            return False
        if _column_lengths(value) == {examples}:
            raise _ambiguous(name, examples, examples)
        return True

    return _mapped(batch, "batch", cut, is_examples)


def _ambiguous(name: str, elements: int, length: int) -> ValueError:
    return ValueError(
        f"{name} may hold one element an example ({elements} examples), or columns of {length} examples: pass split="
    )


def _lengths(value: Any, name: str, *, columns: bool) -> Iterator[tuple[str, int]]:
    """Yield the number of examples that each leaf seems to hold.

    Args:
        value: the batch, or a part of it.
        name: its name in messages.
        columns: whether a list whose tensors share their first dimension is a container, as a DataLoader collates
            ``[x, y]``; else it has one element an example.
    """
    _refuse(value, name)
    if isinstance(value, Tensor) or _is_array(value):
        if value.ndim:
            yield name, value.shape[0]
    elif _is_list(value) and value and _has_elements(value, top=name == "batch", columns=columns):
        if not (isinstance(value, tuple) and all(isinstance(item, _NUMBERS) for item in value)):  # a size, perhaps
            yield name, len(value)
    else:
        for key, item in _items(value):
            yield from _lengths(item, f"{name}{key}", columns=columns)


def _has_elements(value: Any, *, top: bool, columns: bool) -> bool:
    """Tell whether a list is taken for one with an element an example."""
    if all(isinstance(item, _PLAIN) for item in value):
        return True
    if len({_kind(item) for item in value if item is not None}) > 1:  # examples are of one kind
        return False
    lengths = _column_lengths(value)
    if top and not (isinstance(value, list) and all(_is_record(item) for item in value)):
        return isinstance(value, list) and len(lengths) > 1
    # one element is no batch of examples
    return len(lengths) != 1 or not (columns or len(value) == 1)


def _kind(value: Any) -> Any:
    return (value.dtype, value.ndim) if isinstance(value, Tensor) or _is_array(value) else type(value)


def _is_record(value: Any) -> bool:
    """Tell whether something may be one example, as a dataset returns it: no column of texts, and no plain tensor."""
    if isinstance(value, tuple):
        return len({type(item) for item in value}) > 1 or not all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, Mapping) or _is_dataclass(value)


def _column_lengths(values: Any) -> set[int]:
    """Return the numbers of examples that a list's elements would hold, were they columns."""
    if all(isinstance(value, _PLAIN) or _has_number(value) for value in values):
        return set()
    try:
        return {length for value in values for _, length in _lengths(value, "an element", columns=True)}
    except TypeError:  # what cannot be split is no column
        return set()


def _has_number(value: Any) -> bool:
    """Tell whether something has a number of its own, as an example has a label."""
    if not _is_record(value):
        return False
    return any(
        isinstance(item, (int, float, complex)) or (isinstance(item, Tensor) and item.ndim == 0)
        for _, item in _items(value)
    )


def _refuse(value: Any, name: str) -> None:
    """Raise the error of something that holds tensors and cannot be cut."""
    kind = ""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            kind = f"a {layout} tensor"
    elif isinstance(value, PackedSequence):
        kind = "a packed sequence"
    elif not (isinstance(value, (Mapping, list, tuple, type)) or _is_array(value) or _is_dataclass(value)):
        held = getattr(value, "__dict__", {}).values()
        if callable(getattr(value, "to", None)) or any(isinstance(item, Tensor) for item in held):
            kind = _described(value)
    if kind:
        raise TypeError(f"{name} is {kind}, which split_batch cannot split: pass split=")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{key}", item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif _is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def _mapped(value: Any, name: str, cut: Callable[[Any], Any], is_examples: Callable[[Any, str], bool]) -> Any:
    """Rebuild a batch with every leaf that has examples cut."""
    if isinstance(value, Tensor) or _is_array(value):
        return cut(value) if value.ndim else value
    if _is_list(value) and is_examples(value, name):
        return cut(value)
    items = list(_items(value))
    mapped = [_mapped(item, f"{name}{key}", cut, is_examples) for key, item in items]
    made: Any
    if isinstance(value, Mapping):
        keyed = dict(zip(value, mapped, strict=True))
        return keyed if type(value) is dict else _rebuilt(value, keyed, name)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*mapped)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped)
    if _is_dataclass(value):
        made = copy.copy(value)
        for field, item in zip(dataclasses.fields(value), mapped, strict=True):
            object.__setattr__(made, field.name, item)
        return made
    return value


def _rebuilt(value: Any, items: Mapping[Any, Any], name: str) -> Any:
    """Return a library's own mapping (a BatchEncoding) with other items; it keeps what else it holds."""
    try:
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
    except Exception as error:
        raise TypeError(
            f"{name} is {_described(value)}, which split_batch cannot fill with a part of its items "
            f"({type(error).__name__}: {error}): pass split="
        ) from error
    return made


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or type(value) is tuple


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _described(batch: Any) -> str:
    return f"{'an' if type(batch).__name__[0] in 'aeiouAEIOU' else 'a'} {type(batch).__name__}"
