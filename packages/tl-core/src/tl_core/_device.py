"""Devices: which ones there are, and moving nested batches to one."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def resolve_device(device: str | torch.device) -> torch.device:
    """Check that a device exists here.

    Raises:
        TypeError: Not a string or ``torch.device``.
        ValueError: An unknown or unavailable device; the message lists those that are available.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a string or a torch.device, got {type(device).__name__} {device!r}")
    try:
        resolved = torch.device(device)
        # Trying it is the only question that every backend answers: availability, the index, a build without it.
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError):  # which one depends on the backend
        resolved = torch.device("meta")
    if resolved.type == "meta":
        raise ValueError(f"device {str(device)!r} is not available; available are {', '.join(available_devices())}")
    return resolved


def available_devices() -> list[str]:
    """List the devices a run can use, the CPU first."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            found += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found


def move_to_device(batch: Any, device: str | torch.device) -> Any:
    """Move a batch to a device, through nested containers, and never modify what was handed in.

    Lists, tuples, namedtuples, mappings (of the same type where it can be rebuilt), dataclasses and objects with a
    ``to`` method are followed; anything else is passed on as it is. What is already there is returned as the same
    object, containers included.

    Args:
        batch: Tensors, however nested.
        device: Where to.

    Returns:
        The batch on the device.
    """
    target = torch.device(device)
    return _move(batch, target)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        # Copies to a CUDA device are ordered by its stream, so nobody has to wait for them; other backends and the way
        # back to the CPU do not promise that.
        return value.to(device, non_blocking=device.type == "cuda" and value.device.type == "cpu")
    if isinstance(value, (str, bytes, type, nn.Module)):
        return value
    if isinstance(value, (dict, UserDict)):
        return _rebuild_dict(value, {key: _move(item, device) for key, item in value.items()})
    if callable(getattr(value, "to", None)):
        return _move_object(value, device)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: _move(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return _rebuild_sequence(value, [_move(item, device) for item in value])
    if dataclasses.is_dataclass(value):
        return _move_dataclass(value, device)
    return value


def _rebuild_dict(old: Any, moved: dict[Any, Any]) -> Any:
    if all(moved[key] is item for key, item in old.items()):
        return old
    new = copy.copy(old)
    for key, item in moved.items():
        new[key] = item
    return new


def _rebuild_mapping(old: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if all(moved[key] is item for key, item in old.items()):
        return old
    # copy.copy of an unknown mapping may share its storage, so that setting items would change the original.
    try:
        new = type(old)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
    return new if list(new) == list(old) else moved


def _rebuild_sequence(old: Any, moved: list[Any]) -> Any:
    if all(new is item for new, item in zip(moved, old, strict=True)):
        return old
    if isinstance(old, list):
        new = copy.copy(old)
        new[:] = moved
        return new
    if hasattr(old, "_fields"):
        return type(old)(*moved)
    return tuple(moved)


def _move_dataclass(old: Any, device: torch.device) -> Any:
    values = {field.name: getattr(old, field.name) for field in dataclasses.fields(old) if hasattr(old, field.name)}
    moved = {name: _move(item, device) for name, item in values.items()}
    if all(moved[name] is item for name, item in values.items()):
        return old
    new = copy.copy(old)
    for name, item in moved.items():
        object.__setattr__(new, name, item)  # frozen dataclasses too
    return new


def _move_object(old: Any, device: torch.device) -> Any:
    """Call an object's own ``to`` on a copy that shares the tensors: some (graph batches) move in place."""
    tensors = list(_tensors(old, set()))
    if tensors and all(_is_on(tensor, device) for tensor in tensors):
        return old
    try:
        new = copy.deepcopy(old, {id(tensor): tensor for tensor in tensors})
    except Exception:  # noqa: BLE001  an object that cannot be deep-copied may raise anything
        new = copy.copy(old)
    moved = new.to(device)
    return new if moved is None else moved


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type:
        return False
    # "cuda" means the current device: a tensor made there says which one that is.
    return tensor.device == device or tensor.device == torch.empty(0, device=device).device


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Find the tensors that an object holds, through containers and attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += list(value.values())
    elif isinstance(value, (list, tuple)):
        inner += list(value)
    inner += list(getattr(value, "__dict__", {}).values())
    for item in inner:
        yield from _tensors(item, seen)
