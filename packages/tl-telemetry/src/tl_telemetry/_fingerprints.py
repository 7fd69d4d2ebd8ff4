"""What moved between the start and the end of a run, told from norms instead of copies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tl_core import TrainingSetup
from tl_telemetry._figures import norms
from tl_telemetry._tensors import is_lazy

# How far the norms of the same values may lie apart on two devices, relatively.
_OTHER_DEVICE = 1e-5


class Fingerprint:
    """L2 norms and versions of named tensors, kept on their device until two fingerprints are compared."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        readable = {name: t for name, t in tensors.items() if not is_lazy(t) and t.device.type != "meta" and t.numel()}
        with torch.no_grad():
            real = {name: t.detach() for name, t in readable.items()}
            values = norms([t if t.is_floating_point() or t.is_complex() else t.double() for t in real.values()])
        self._norms = dict(zip(readable, values, strict=True))
        self._devices = {name: t.device for name, t in readable.items()}
        self._versions = {name: None if t.is_inference() else t._version for name, t in readable.items()}

    def moved_since(self, earlier: Fingerprint) -> set[str]:
        """Return the names whose values changed. Waits for the device."""
        shared = [name for name in self._norms if name in earlier._norms]
        return {name for name in shared if not self._is_same(name, earlier)}

    def _is_same(self, name: str, earlier: Fingerprint) -> bool:
        now, before = float(self._norms[name]), float(earlier._norms[name])
        if now == before or (math.isnan(now) and math.isnan(before)):
            return True
        # another device adds in another order: Lightning's Trainer moves its model to the CPU when fit ends
        return self._devices[name] != earlier._devices[name] and math.isclose(now, before, rel_tol=_OTHER_DEVICE)

    def touched_since(self, earlier: Fingerprint) -> set[str]:
        """Return the names that an in-place operation wrote to; kernels that keep running statistics do not show."""
        versions = earlier._versions
        return {name for name, version in self._versions.items() if name in versions and versions[name] != version}

    def nonfinite(self) -> list[str]:
        """Return the names whose norm is not finite. Waits for the device."""
        return [name for name, norm in self._norms.items() if not bool(torch.isfinite(norm))]

    def zeros(self) -> set[str]:
        """Return the names whose elements are all 0. Waits for the device."""
        return {name for name, norm in self._norms.items() if float(norm) == 0.0}

    def names(self) -> set[str]:
        return set(self._norms)


# What a setup always has; anything else was added to it.
_SETUP_PARTS = frozenset(vars(TrainingSetup(nn.Module(), {})))
# Of each tensor of an average, about so many elements are kept: enough to tell whether it follows the weights.
NUM_SAMPLED = 4096


@dataclass
class StateEntry:
    """Something that a setup keeps beside the model, at the start or the end of a run.

    Attributes:
        value: what it is.
        in_state: whether it is an entry of ``setup.state``; else it is an average in an attribute of the setup.
        averages: whether something says that it is an average (its class, its name, a decay it keeps).
        copies: a tensor of its own that equals each of the model's parameters, by their names; empty unless each has
            one. Only looked for at the start.
        aliases: whether it is called an average and holds the parameters themselves, and no copies.
        tensors: the fingerprint of what its ``state_dict`` holds.
        numbers: the plain numbers in it.
        samples: of an average, some elements of each tensor.
        weights: beside them, the same elements of each of the model's parameters.
    """

    value: Any
    in_state: bool
    averages: bool
    copies: dict[str, str]
    aliases: bool
    tensors: Fingerprint
    numbers: tuple[Any, ...]
    samples: dict[str, Tensor]
    weights: dict[str, Tensor]


def state_entries(setup: TrainingSetup, *, compare: bool) -> dict[str, StateEntry]:
    """Read what a setup keeps beside the model, by the places where it is: what has a ``state_dict``, or holds tensors.

    ``compare`` looks for copies of the weights in them, which waits for the device: only before a run.
    """
    entries = {}
    weights = {name: p.detach() for name, p in setup.model.named_parameters() if not is_lazy(p)}
    kept = [(f"setup.state[{name!r}]", name, value, True) for name, value in setup.state.items()]
    kept += [(_shown(setup, place), place, value, False) for place, value in _attributes_that_average(setup)]
    for place, name, value, in_state in kept:
        read = _read_state(value)
        if read is None:
            continue
        tensors, numbers = read
        averages = is_average(name, value)
        copies = _copies(tensors, weights) if compare else {}
        entries[place] = StateEntry(
            value=value,
            in_state=in_state,
            averages=averages,
            copies=copies,
            aliases=not copies and _is_called_average(name, value) and _shares(tensors, weights),
            tensors=Fingerprint(tensors),
            numbers=numbers,
            samples=_samples(tensors) if averages else {},
            weights=_samples(weights) if averages else {},
        )
    return entries


def _shown(setup: TrainingSetup, place: str) -> str:
    """Return an attribute's place in the words of its owner: what adapts a Trainer adds callbacks by their names."""
    if place.startswith("trainer."):
        return place
    return f"callback {place}" if setup.driver else f"setup.{place}"


def _attributes_that_average(setup: TrainingSetup) -> Iterator[tuple[str, Any]]:
    """Give the averages among the attributes that were added to a setup, or inside of one (a callback's)."""
    for name, value in vars(setup).items():
        if name in _SETUP_PARTS or value is setup.model:
            continue
        if _holds_average(name, value):
            yield name, value
        elif not isinstance(value, (nn.Module, Mapping, list, tuple, Tensor)):
            for inner, held in getattr(value, "__dict__", {}).items():
                if held is not setup.model and _holds_average(f"{name}.{inner}", held):
                    yield f"{name}.{inner}", held


def _holds_average(name: str, value: Any) -> bool:
    return isinstance(value, (nn.Module, Mapping, list, tuple)) and is_average(name, value)


def _samples(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: t.detach().reshape(-1)[:: max(1, t.numel() // NUM_SAMPLED)].clone()
        for name, t in tensors.items()
        if not is_lazy(t) and t.is_floating_point() and t.layout is torch.strided
    }


def _read_state(value: Any) -> tuple[dict[str, Tensor], tuple[Any, ...]] | None:
    state_dict = getattr(value, "state_dict", None)
    tensors: dict[str, Tensor] = {}
    numbers: list[Any] = []
    if not callable(state_dict):  # tensors in a dict or a list, as short loops keep an average
        _flatten("", value if isinstance(value, (Mapping, list, tuple)) else (), tensors, numbers)
        return (tensors, tuple(numbers)) if tensors else None
    try:
        state = state_dict()
    except Exception:  # noqa: BLE001  somebody's object that cannot be read yet is not this check's business
        return None
    _flatten("", state, tensors, numbers)
    # an average that only counts so far (a warmup) may not save its counter
    own = getattr(value, "__dict__", {}).values()
    numbers += [number for number in own if isinstance(number, (int, float)) and not isinstance(number, bool)]
    return tensors, tuple(numbers)


def _flatten(prefix: str, value: Any, tensors: dict[str, Tensor], numbers: list[Any]) -> None:
    if isinstance(value, Tensor):
        tensors[prefix] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, tensors, numbers)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{prefix}[{index}]", item, tensors, numbers)
    elif isinstance(value, (int, float, str)):
        numbers.append(value)


def _copies(tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, str]:
    remaining = dict(tensors)
    found = {}
    for name, weight in weights.items():
        # alike ones (biases of 0) are told apart by their names
        for key in sorted(remaining, key=lambda key: not key.endswith(name)):
            tensor = remaining[key]
            alike = tensor.shape == weight.shape and tensor.device == weight.device
            # an average of low-precision weights is kept in float32
            if alike and tensor.data_ptr() != weight.data_ptr() and torch.equal(tensor.to(weight.dtype), weight):
                found[name] = key
                del remaining[key]
                break
        else:
            return {}
    return found


def _shares(tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> bool:
    """Tell whether every weight's memory is among the tensors'."""
    held = {(t.data_ptr(), t.device) for t in tensors.values() if t.layout is torch.strided and not is_lazy(t)}
    return bool(weights) and all((w.data_ptr(), w.device) in held for w in weights.values() if w.numel())


_AVERAGE_WORDS = ("averag", "avg", "polyak", "shadow")
_AVERAGE_SETTINGS = ("decay", "beta", "momentum", "tau", "alpha", "ema_decay")
_AVERAGE_UPDATES = ("update", "update_parameters", "update_average", "step")


def is_average(name: str, value: Any) -> bool:
    if isinstance(value, AveragedModel) and value.avg_fn is None and value.multi_avg_fn is None:
        return False  # equal weights (SWA) are averaged over the last part of a training, not over a short run
    if _is_called_average(name, value):
        return True
    # a penalty towards a copy of the weights has an alpha too, but nothing that updates the copy
    own = getattr(value, "__dict__", {})
    updates = any(callable(getattr(value, method, None)) for method in _AVERAGE_UPDATES)
    return updates and any(isinstance(own.get(setting), float) for setting in _AVERAGE_SETTINGS)


def _is_called_average(name: str, value: Any) -> bool:
    text = f"{name} {type(value).__name__}"
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]
    return "ema" in words or any(part in text.lower() for part in _AVERAGE_WORDS)


def named_parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
