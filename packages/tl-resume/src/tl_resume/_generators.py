"""Random number generators: the global ones, and those that a setup holds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume._iterators import own_entries
from tl_resume._model_names import attributes

_ACCELERATORS = ("cuda", "xpu")
# A loader holds its sampler, which holds its generator; items of a longer list are data.
_DEPTH = 3
_MAX_ITEMS = 64


def global_states() -> dict[str, Any]:
    """Take the states of the global generators: python, numpy (where imported), torch, initialised accelerators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = numpy_random()
    if numpy is not None:
        states["numpy"] = numpy.get_state(legacy=False)
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            states[name] = module.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def check_global_states(states: Any) -> list[str]:
    """List what keeps the states of a file from being set here; accelerators that are not here have no say."""
    if not isinstance(states, dict):
        return ["rng is no dict"]
    wrong = [f"rng of python {problem}" for problem in _try(random.Random(), states.get("python"))]
    wrong += [f"rng of torch {problem}" for problem in _try(torch.Generator(), states.get("torch"))]
    if "numpy" in states:
        import numpy

        wrong += [f"rng of numpy {problem}" for problem in _try(numpy.random.RandomState(), states["numpy"])]
    for name in _ACCELERATORS:
        if not isinstance(states.get(name, []), list):
            wrong.append(f"rng of {name} is no list")
            continue
        for index, state in enumerate(states.get(name, [])[: _device_count(name)]):
            generator = torch.Generator(f"{name}:{index}")
            wrong += [f"rng of {name}:{index} {problem}" for problem in _try(generator, state)]
    if "mps" in states and torch.backends.mps.is_available():
        wrong += [f"rng of mps {problem}" for problem in _try(torch.Generator("mps"), states["mps"])]
    return wrong


def set_global_states(states: dict[str, Any]) -> None:
    """Set the global generators."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    for name in _ACCELERATORS:
        for index, state in enumerate(states.get(name, [])[: _device_count(name)]):
            getattr(torch, name).set_rng_state(state, f"{name}:{index}")
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
    torch.set_rng_state(states["torch"])


def _device_count(name: str) -> int:
    module = getattr(torch, name, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def numpy_random() -> Any:
    """Give ``numpy.random`` where numpy is imported; it is no dependency."""
    return getattr(sys.modules.get("numpy"), "random", None)


def is_generator(value: Any) -> bool:
    """Tell whether a value is a random number generator of torch, numpy or python."""
    if isinstance(value, torch.Generator) or type(value) is random.Random:
        return True
    numpy = numpy_random()
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def generator_state(generator: Any) -> Any:
    """Take the state of a generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _try(generator: Any, state: Any) -> list[str]:
    before = generator_state(generator)
    try:
        if isinstance(generator, torch.Generator) and not isinstance(state, torch.Tensor):
            return ["is no tensor"]
        set_generator_state(generator, state)
        _check_place(generator)
    except Exception as error:  # noqa: BLE001  a state of another kind makes each of them raise as it likes
        return [f"cannot be set ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"]
    finally:
        set_generator_state(generator, before)
    return []


def _check_place(generator: Any) -> None:
    """Check what the generators let through: numpy's would draw from memory that is not theirs, or draw for ever."""
    if isinstance(generator, random.Random):
        spare = generator.getstate()[2]
        if spare is not None and type(spare) is not float:
            raise TypeError(f"the spare normal number is a {type(spare).__name__}")
        return
    state = {} if isinstance(generator, torch.Generator) else generator_state(generator)
    inner = state.get("state")
    for held, name, most in ((inner, "pos", 624), (state, "buffer_pos", 4)):
        if isinstance(held, dict) and not 0 <= held.get(name, 0) <= most:
            raise ValueError(f"{name} is {held[name]}, outside of 0 to {most}")
    key = inner.get("key") if isinstance(inner, dict) and "pos" in inner else None
    if key is not None and not (key[0] >> 31 or key[1:].any()):
        raise ValueError("its key is zero, from which only zeros follow")  # numpy waits for ever for another number


def check_generator(name: str, generator: Any, state: Any) -> list[str]:
    """List what keeps a state from being set in a generator, which is as before afterwards."""
    return [f"{name} {problem}" for problem in _try(generator, state)]


def find_generators(setup: TrainingSetup) -> dict[str, Any]:
    """Find the generators that a setup holds, by their place; the global ones are left out.

    Looked at are modules' attributes, entries of ``setup.state`` and attributes of the setup, and what plain objects,
    lists and dicts among them hold.
    """
    found: dict[str, Any] = {}
    seen: set[int] = _global_generators()
    for raw, module in setup.model.named_modules():
        for name, value in _module_attributes(module):
            _find(f"model.{raw}.{name}" if raw else f"model.{name}", value, 1, seen, found)
    for name, value in own_entries(setup).items():
        _find(f"state[{name!r}]", value, _DEPTH, seen, found)
    for name, value in attributes(setup).items():
        _find(f"setup.{name}", value, _DEPTH, seen, found)
    return found


def _global_generators() -> set[int]:
    ids = {id(torch.default_generator), id(getattr(random, "_inst", None))}
    ids |= {id(generator) for generator in getattr(torch.cuda, "default_generators", ())}
    numpy = numpy_random()
    if numpy is not None:
        ids.add(id(numpy.mtrand._rand))
    return ids


def _module_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield name, value


def _find(place: str, value: Any, depth: int, seen: set[int], found: dict[str, Any]) -> None:
    if is_generator(value):
        if id(value) not in seen:
            seen.add(id(value))
            found[place] = value
        return
    if not depth or isinstance(value, (type, str, bytes, torch.Tensor)) or id(value) in seen:
        return
    if isinstance(value, nn.Module):
        seen.add(id(value))
        for raw, module in value.named_modules():
            for name, item in _module_attributes(module):
                _find(f"{place}.{raw}.{name}" if raw else f"{place}.{name}", item, depth - 1, seen, found)
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{place}[{key!r}]", item) for key, item in value.items()] if len(value) <= _MAX_ITEMS else []
    elif isinstance(value, (list, tuple)):
        items = [(f"{place}[{index}]", item) for index, item in enumerate(value)] if len(value) <= _MAX_ITEMS else []
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        items = [(f"{place}.{name}", item) for name, item in vars(value).items()]
    if items:
        seen.add(id(value))
    for inner, item in items:
        _find(inner, item, depth - 1, seen, found)
