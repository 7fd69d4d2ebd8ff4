"""Sees which buffers move within forward passes, and not by what else a step does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tl_core import module_names


@contextmanager
def watching_buffers(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of a model's buffers that forward passes of it, or of a part of it, change or replace."""
    moved: list[str] = []
    parts = {id(part) for part in model.modules()}
    running: list[tuple[nn.Module, dict[str, tuple[int, int]]]] = []

    def before(module: nn.Module, _args: Any) -> None:
        if id(module) in parts and not running:
            running.append((module, _versions(model)))

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if running and running[0][0] is module:
            _, earlier = running.pop()
            now = _versions(model)
            moved.extend(name for name in now if now[name] != earlier.get(name) and name not in moved)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield moved
    finally:
        for handle in handles:
            handle.remove()


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        f"{place}.{name}" if place else name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
        for place, module in module_names(model).items()
        for name, buffer in module.named_buffers(recurse=False)
    }
