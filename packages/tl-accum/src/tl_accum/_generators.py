"""Random number generators of the person's own, in what a loop keeps: to draw others on purpose."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

# How deep into objects and containers generators are looked for.
MAX_DEPTH = 4
MAX_MEMBERS = 100


def disturb(values: Iterable[Any], seed: int) -> None:
    """Seed every generator that is found in some objects anew, each with another number."""
    for number, generator in enumerate(_found(values, MAX_DEPTH, set())):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed + number)
        elif isinstance(generator, random.Random):
            generator.seed(seed + number)
        else:
            bits = generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator
            bits.state = type(bits)(seed + number).state


def _found(values: Iterable[Any], depth: int, seen: set[int]) -> Iterator[Any]:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_generator(value):
            yield value
        elif depth and (inner := _members(value)):
            yield from _found(inner, depth - 1, seen)


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _members(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        held = list(value)
    else:
        held = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
    return held if len(held) <= MAX_MEMBERS else []
