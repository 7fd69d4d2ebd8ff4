"""How many elements of each micro-batch count: tokens that are not ignored, ones of a mask, examples."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Values that a tensor of labels may use for "does not count", the usual ones first; else the commonest ones are tried.
USUAL_IGNORED = (-100, -1, 0)
MAX_TRIED = 4


class Counts(NamedTuple):
    """What could be counted in each micro-batch.

    Attributes:
        what: in words: ``"labels != -100 in batch['labels']"``.
        numbers: of each micro-batch.
        total: of the full batch: their sum, unless what is counted is padding too.
    """

    what: str
    numbers: tuple[float, ...]
    total: float = 0.0


def candidates(parts: Sequence[Any], full: Any) -> Iterator[Counts]:
    """Yield everything that could be counted in micro-batches, and that differs between them."""
    leaves = [dict(_leaves(part, "batch")) for part in (*parts, full)]
    for name in leaves[0]:
        held = [found[name] for found in leaves if name in found]
        if len(held) == len(leaves):
            for what, (*numbers, total), _ in _of(name, held):
                if len(set(numbers)) > 1 and all(n >= 0 for n in numbers) and total > 0:
                    yield Counts(what, tuple(numbers), total)


def _of(name: str, held: list[Tensor]) -> Iterator[Counts]:
    if any(tensor.dim() == 0 for tensor in held):
        return
    if all(tensor.dtype == torch.bool for tensor in held):
        yield Counts(f"{name} is True", _count(held, lambda t: t.sum()))
        yield Counts(f"{name} is False", _count(held, lambda t: (~t).sum()))
        return
    if all(not tensor.is_floating_point() and not tensor.is_complex() for tensor in held):
        for value in _ignored(held):
            yield Counts(f"{name} != {value}", _count(held, lambda t, v=value: (t != v).sum()))
            # the first position of a sequence has nothing that predicts it
            if all(tensor.dim() > 1 for tensor in held):
                yield Counts(f"{name}[:, 1:] != {value}", _count(held, lambda t, v=value: (t[:, 1:] != v).sum()))
        if all(bool((tensor >= 0).all()) for tensor in held):
            yield Counts(f"the sum of {name}", _count(held, lambda t: t.sum()))
    elif all(not tensor.is_complex() and bool((tensor >= 0).all()) for tensor in held):
        yield Counts(f"the sum of {name}", _count(held, lambda t: t.double().sum()))
        yield Counts(f"{name} > 0", _count(held, lambda t: (t > 0).sum()))
    yield Counts(f"elements of {name}", _count(held, lambda t: torch.tensor(t.numel())))
    yield Counts(f"examples in {name}", _count(held, lambda t: torch.tensor(t.shape[0])))


def _ignored(held: list[Tensor]) -> list[int]:
    """Return the values that may mean that an element does not count: those that are there, the usual ones first."""
    values, counts = torch.cat([tensor.flatten() for tensor in held]).unique(return_counts=True)  # type: ignore[no-untyped-call]
    there = [int(value) for value in values[counts.argsort(descending=True)].tolist()]
    usual = [value for value in USUAL_IGNORED if value in there]
    return list(dict.fromkeys([*usual, *there]))[: MAX_TRIED + len(usual)]


def _count(held: list[Tensor], count: Any) -> tuple[float, ...]:
    return tuple(float(count(tensor)) for tensor in held)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield name, value.detach().cpu()
    elif numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.kind in "biuf":
            yield name, torch.from_numpy(value.copy())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield from _lengths(value, f"{name}[i]")
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{name}.{field.name}")


def _lengths(examples: Sequence[Any], name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the lengths of what each example of a list holds: the boxes of a detector's targets."""
    if examples and all(isinstance(one, Tensor) and one.dim() for one in examples):
        yield f"len({name})", torch.tensor([one.shape[0] for one in examples])
    elif examples and all(isinstance(one, Mapping) for one in examples):
        for key in examples[0]:
            if all(key in one for one in examples):
                yield from _lengths([one[key] for one in examples], f"{name}[{key!r}]")
