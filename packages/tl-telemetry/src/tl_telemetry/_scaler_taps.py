"""The patches that see what GradScalers do, however their methods were bound, wrapped or subclassed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler


class ScalerWatcher(Protocol):
    """What is told of scalers."""

    def unscale_begins(self) -> None: ...
    def unscale_ended(self, found_inf: torch.Tensor) -> None: ...
    def scaler_step_begins(self) -> int: ...
    def scaler_step_ended(self, before: int) -> None: ...
    def scale_update_begins(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None: ...
    def scale_update_ended(self, scale: torch.Tensor) -> None: ...


Told = Callable[[], Sequence[ScalerWatcher]]


@contextmanager
def patched_scaler(told: Told) -> Iterator[None]:
    """Tell watchers of unscaling, of the scale's updates, and of steps that a scaler makes or skips.

    GradScaler looks up torch's two functions and its own ``_maybe_opt_step`` at each call, so replacing them sees
    calls of methods that were bound before too. (torch 2.6 to 2.13.)
    """
    with (
        _replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", _unscaling(told)),
        _replaced(torch, "_amp_update_scale_", _updating(told)),
        _replaced(GradScaler, "_maybe_opt_step", _stepping(told)),
    ):
        yield


def _unscaling(told: Told) -> Callable[[Any], Any]:
    def patch(original: Any) -> Any:
        @wraps(original)
        def unscale(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> Any:
            watchers = _watchers(told)
            for watcher in watchers:
                watcher.unscale_begins()
            result = original(grads, found_inf, inv_scale)
            for watcher in watchers:
                watcher.unscale_ended(found_inf)
            return result

        return unscale

    return patch


def _updating(told: Told) -> Callable[[Any], Any]:
    def patch(original: Any) -> Any:
        @wraps(original)
        def update(scale: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor, *settings: Any) -> Any:
            watchers = _watchers(told)
            for watcher in watchers:
                watcher.scale_update_begins(scale, found_inf)
            result = original(scale, growth_tracker, found_inf, *settings)
            for watcher in watchers:
                watcher.scale_update_ended(scale)
            return result

        return update

    return patch


def _stepping(told: Told) -> Callable[[Any], Any]:
    def patch(original: Any) -> Any:
        @wraps(original)
        def maybe_step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            watchers = _watchers(told)
            begun = [watcher.scaler_step_begins() for watcher in watchers]
            result = original(self, optimizer, *args, **kwargs)
            for watcher, before in zip(watchers, begun, strict=True):
                watcher.scaler_step_ended(before)
            return result

        return maybe_step

    return patch


def _watchers(told: Told) -> Sequence[ScalerWatcher]:
    # compiled code must not depend on the watchers
    return () if torch.compiler.is_compiling() else told()


@contextmanager
def _replaced(owner: Any, name: str, patch: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    patched = patch(original)
    setattr(owner, name, patched)
    try:
        yield
    finally:
        if getattr(owner, name) is patched:
            setattr(owner, name, original)
