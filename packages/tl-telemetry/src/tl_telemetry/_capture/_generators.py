"""Random number generators: what their state is, and putting it back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from tl_telemetry._capture._nodes import Generator


def generator_kind(value: Any) -> str | None:
    """Return what kind of random number generator a value is; None for anything else."""
    if isinstance(value, torch.Generator):
        return "torch.Generator"
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else "random.Random"  # the system's has no state
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        if isinstance(value, numpy.random.Generator):
            return "numpy.random.Generator"
        if isinstance(value, numpy.random.RandomState):
            return "numpy.random.RandomState"
    return None


def capture_generator(value: Any) -> Generator:
    """Make a node of a generator, with a copy of its state."""
    kind = generator_kind(value)
    if kind == "torch.Generator":
        return Generator(kind, value.get_state(), value.device)
    if kind == "random.Random":
        return Generator(kind, value.getstate(), None)
    if kind == "numpy.random.Generator":
        return Generator(kind, _frozen(value.bit_generator.state), None)
    # A RandomState keeps every other normal number for later, which its bit generator does not know.
    return Generator("numpy.random.RandomState", _frozen(value.get_state(legacy=False)), None)


def put_back_generator(node: Generator, live: Any) -> Any:
    """Put a generator where another one stood; one that is missing, or of another kind, is built."""
    made = live if fits_generator(node, live) else _new(node)
    if node.kind == "torch.Generator":
        made.set_state(node.state)
    elif node.kind == "random.Random":
        made.setstate(node.state)
    elif node.kind == "numpy.random.Generator":
        made.bit_generator.state = _thawed(node.state)
    else:
        made.set_state(_thawed(node.state))
    return made


def fits_generator(node: Generator, live: Any) -> bool:
    """Tell whether a generator can take the state of another one."""
    if generator_kind(live) != node.kind:
        return False
    if node.kind == "torch.Generator":
        return bool(live.device == node.device)
    return node.kind == "random.Random" or capture_generator(live).state[0] == node.state[0]  # the bit generator's name


def _new(node: Generator) -> Any:
    if node.kind == "torch.Generator":
        return torch.Generator(device=node.device or "cpu")
    if node.kind == "random.Random":
        return random.Random()
    library = sys.modules["numpy"].random  # imported: a setup that held one is alive, or was
    bits = getattr(library, dict(node.state)["bit_generator"])()
    return library.Generator(bits) if node.kind == "numpy.random.Generator" else library.RandomState(bits)


def _frozen(value: Any) -> Any:
    """Copy a state, made of dicts, arrays and numbers, to tuples that can be compared."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return ("array", value.dtype.str, tuple(value.tolist())) if hasattr(value, "tolist") else value


def _thawed(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if value[0] == "array":
        return sys.modules["numpy"].array(value[2], dtype=value[1])
    return {key: _thawed(item) for key, item in value}
