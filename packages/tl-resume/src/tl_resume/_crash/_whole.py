"""Whether a loaded state is the old one, the new one, or something else."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.nn.parameter import is_lazy

from tl_core import TrainingSetup
from tl_resume._format._chunks import memory_of
from tl_resume._generators import is_generator
from tl_resume._iterators import is_stateful
from tl_resume._model_names import attributes
from tl_resume._state import is_plain, training_state

State = dict[str, str]  # by path in the training state, a digest or the text of the value
_LEFT_OUT = ("rng",)  # restoring a checkpoint is not the only thing that draws numbers
_MAX_NAMED = 4


def fingerprints(setup: TrainingSetup) -> State:
    """A short text for each tensor and value of a setup's training state, equal where they are equal bit for bit."""
    captured = {part: value for part, value in training_state(_told(setup)).items() if part not in _LEFT_OUT}
    return {"\t".join(path): text for path, text in _leaves(captured, ())}


def _told(setup: TrainingSetup) -> TrainingSetup:
    """The setup with a dict of their plain members in place of objects that do not tell their state."""
    told = copy.copy(setup)
    told.schedulers = {name: value for name, value in setup.schedulers.items() if is_stateful(value)}
    silent = {name: value for name, value in setup.schedulers.items() if not is_stateful(value)}
    told.state = {name: _telling(value) for name, value in {**silent, **setup.state}.items()}
    for name, value in attributes(setup).items():
        setattr(told, name, _telling(value))
    return told


def _telling(value: Any) -> Any:
    if is_stateful(value) or is_generator(value) or is_plain(value):
        return value
    return {name: member for name, member in getattr(value, "__dict__", {}).items() if is_plain(member)}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, (*path, str(key)))
        if not value:
            yield path, "{}"
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from _leaves(member, (*path, str(index)))
        if not value:
            yield path, "[]"
    else:
        yield path, _fingerprint(value)


def _fingerprint(value: Any) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(numpy.ascontiguousarray(value).tobytes())}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if is_lazy(value):
        return "not initialised yet"
    tensor = value.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        return repr(tensor)
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(memory_of(tensor))}"


@dataclass(frozen=True)
class References:
    """Hold the states that an intact load gives.

    Args:
        fresh: What ``make_setup()`` builds, before any load.
        old: The state that the first checkpoint gives.
        new: The state that the second one gives, when nothing disturbs its save.
        unsteady: Paths that differ between two loads of the same checkpoint; they are not compared.
    """

    fresh: State
    old: State
    new: State
    unsteady: frozenset[str]

    def distinct(self, first: State, second: State) -> list[str]:
        """The compared paths in which two states differ."""
        paths = dict.fromkeys([*first, *second])
        return [path for path in paths if path not in self.unsteady and first.get(path) != second.get(path)]


def mixture(state: State, references: References, old_name: str, new_name: str) -> tuple[bool, str] | None:
    """Say what a loaded state is when it is neither the old nor the new one.

    Returns:
        None when it is whole; otherwise whether nothing at all was loaded, and the state in words.
    """
    not_old, not_new = references.distinct(state, references.old), references.distinct(state, references.new)
    if not not_old or not not_new:
        return None
    if not references.distinct(state, references.fresh):
        return True, "load() returns without an error, and the setup is as make_setup() built it"
    neither = [path for path in not_old if path in set(not_new)]
    origins = {
        "neither": neither,
        new_name: [path for path in not_old if path not in set(neither)],
        old_name: [path for path in not_new if path not in set(neither)],
    }
    whole_model = sum(any(path.startswith("model\t") for path in paths) for paths in origins.values()) == 1
    named = []
    for origin, paths in reversed(origins.items()):
        if paths:
            pieces = list(dict.fromkeys(_piece(path.split("\t"), whole_model) for path in paths))
            more = [f"{len(pieces) - _MAX_NAMED} more"] if len(pieces) > _MAX_NAMED else []
            named.append(f"{_and(pieces[:_MAX_NAMED] + more)} of {origin}")
    return False, f"load() returns without an error, but gives {_and(named)}"


def _piece(path: list[str], whole_model: bool) -> str:
    part, name = path[0], path[1] if len(path) > 1 else ""
    if part == "model":
        return "the model" if whole_model else name
    if part in ("optimizers", "schedulers"):
        return f"{part[:-1]} {name!r}"
    if part == "attributes":
        return f"setup.{name}"
    if part == "state":
        return f"setup.state[{name!r}]"
    return part


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
