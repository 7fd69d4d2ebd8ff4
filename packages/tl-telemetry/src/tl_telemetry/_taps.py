"""The only place that touches torch's moving parts: global hooks, two patched functions, and their put-back.

Everything is installed when the first watcher attaches and removed when the last one detaches, so checks may nest
and be left in any order. A function that somebody else replaced in the meantime is left alone: what stays in their
chain then only passes calls through.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from tl_telemetry._heard import hearing
from tl_telemetry._scaler_taps import patched_scaler

CLIP_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


class Watcher(Protocol):
    """What a recorder offers to be told of."""

    def watches_thread(self) -> bool: ...
    def watches_optimizer(self, optimizer: torch.optim.Optimizer) -> bool: ...
    def backward_begins(self, roots: Sequence[Any], given: Sequence[Any], accumulate: bool) -> None: ...
    def backward_ended(self) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None: ...
    def step_ended(self, optimizer: torch.optim.Optimizer, closure: bool) -> None: ...
    def clip_begins(self, function: str, parameters: Sequence[torch.Tensor], bound: float) -> None: ...
    def clip_ended(self) -> None: ...
    def unscale_begins(self) -> None: ...
    def unscale_ended(self, found_inf: torch.Tensor) -> None: ...
    def scaler_step_begins(self) -> int: ...
    def scaler_step_ended(self, before: int) -> None: ...
    def scale_update_begins(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None: ...
    def scale_update_ended(self, scale: torch.Tensor) -> None: ...
    def forward_begins(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None: ...
    def forward_ended(self, module: torch.nn.Module, output: Any) -> None: ...
    def modules_changed(self) -> None: ...
    def warned(self, message: str, category: type[Warning], filename: str, lineno: int) -> None: ...


_lock = threading.RLock()
_watchers: tuple[Watcher, ...] = ()
_forward_watchers: tuple[Watcher, ...] = ()
_installed: ExitStack | None = None
_forward_installed: ExitStack | None = None
_clipping = threading.local()


def attach(watcher: Watcher) -> None:
    """Tell ``watcher`` of everything but forward passes from now on."""
    global _watchers, _installed
    with _lock:
        if _installed is None:
            _installed = _install()
        _watchers = (*_watchers, watcher)


def detach(watcher: Watcher) -> None:
    """Stop telling ``watcher``; the last one to leave takes the hooks and patches out."""
    global _watchers, _installed
    with _lock:
        _watchers = tuple(other for other in _watchers if other is not watcher)
        if not _watchers and _installed is not None:
            _installed.close()
            _installed = None


def attach_forward(watcher: Watcher) -> None:
    """Tell ``watcher`` of forward passes too; global module hooks cost a few microseconds a module call."""
    global _forward_watchers, _forward_installed
    with _lock:
        if _forward_installed is None:
            _forward_installed = ExitStack()
            for handle in (
                nn_module.register_module_forward_pre_hook(_before_forward),
                nn_module.register_module_forward_hook(_after_forward),
            ):
                _forward_installed.callback(handle.remove)
        _forward_watchers = (*_forward_watchers, watcher)


def detach_forward(watcher: Watcher) -> None:
    """Stop telling ``watcher`` of forward passes."""
    global _forward_watchers, _forward_installed
    with _lock:
        _forward_watchers = tuple(other for other in _forward_watchers if other is not watcher)
        if not _forward_watchers and _forward_installed is not None:
            _forward_installed.close()
            _forward_installed = None


def _install() -> ExitStack:
    stack = ExitStack()
    # A compiled optimizer step breaks its graph at these two hooks, so that they run, and run outside of the graph.
    disable: Any = torch.compiler.disable  # untyped in torch
    before, after = disable(_before_step), disable(_after_step)
    for handle in (
        torch_optimizer.register_optimizer_step_pre_hook(before),
        torch_optimizer.register_optimizer_step_post_hook(after),
        nn_module.register_module_parameter_registration_hook(_after_registration),
        nn_module.register_module_module_registration_hook(_after_registration),
    ):
        stack.callback(handle.remove)
    stack.enter_context(_patched_backward())
    for name in CLIP_FUNCTIONS:
        stack.enter_context(_patched_clip(name))
    stack.enter_context(patched_scaler(_told))
    stack.enter_context(hearing(_hear))
    return stack


@contextmanager
def _patched_backward() -> Iterator[None]:
    # torch.autograd.backward and .grad look this name up at each call, so replacing it sees every backward however
    # it was imported; replacing torch.autograd.backward itself would miss names imported before.
    engine: Any = torch.autograd
    original = engine._engine_run_backward

    # In a compiled function, backward runs between two graphs, and dynamo looks at every frame below it. It must pass
    # this one by, without passing by the person's own hooks further below, and must not look into the watchers at all.
    begins = torch.compiler.disable(_backward_begins)  # type: ignore[no-untyped-call]
    ended = torch.compiler.disable(_backward_ended)  # type: ignore[no-untyped-call]

    @wraps(original)
    def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        told = _told()
        if not told:
            return original(roots, *args, **kwargs)
        begins(told, roots, args[0] if args else (), bool(kwargs.get("accumulate_grad", False)))
        try:
            return original(roots, *args, **kwargs)
        finally:
            ended(told)

    run_backward = torch.compiler.disable(run_backward, recursive=False)  # type: ignore[no-untyped-call]
    engine._engine_run_backward = run_backward
    try:
        yield
    finally:
        if engine._engine_run_backward is run_backward:
            engine._engine_run_backward = original


@contextmanager
def _patched_clip(name: str) -> Iterator[None]:
    # Each of torch's clip functions is a wrapper around a function in its closure; replacing that cell's content is
    # seen by every form of import, also by names bound before. (torch 2.6 to 2.13: closure variable "func".)
    public = getattr(clip_grad, name, None)
    if public is None or getattr(public, "__closure__", None) is None:
        yield
        return
    cell = public.__closure__[public.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    signature = inspect.signature(original)

    @wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # traced by dynamo: compiled code must not depend on the watchers
            return original(*args, **kwargs)
        told = _told()
        if not told or getattr(_clipping, "inside", False):
            return original(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises the error the person expects
        first, second = tuple(signature.parameters)[:2]
        parameters, bound = given.arguments[first], given.arguments[second]
        if isinstance(parameters, torch.Tensor):
            listed = [parameters]
        else:
            listed = list(parameters)  # an iterator can be read only once: torch gets another one over the same tensors
            given.arguments[first] = (p for p in listed) if isinstance(parameters, GeneratorType) else listed
        for watcher in told:
            watcher.clip_begins(name.lstrip("_"), listed, float(bound))
        _clipping.inside = True
        try:
            return original(*given.args, **given.kwargs)
        finally:
            _clipping.inside = False
            for watcher in told:
                watcher.clip_ended()

    cell.cell_contents = clip
    try:
        yield
    finally:
        if cell.cell_contents is clip:
            cell.cell_contents = original


def _told() -> list[Watcher]:
    return [watcher for watcher in _watchers if watcher.watches_thread()]


def _hear(message: str, category: type[Warning], filename: str, lineno: int) -> None:
    for watcher in _watchers:
        if watcher.watches_thread():
            watcher.warned(message, category, filename, lineno)


def _backward_begins(told: Sequence[Watcher], roots: Sequence[Any], given: Sequence[Any], accumulate: bool) -> None:
    for watcher in told:
        watcher.backward_begins(roots, given, accumulate)


def _backward_ended(told: Sequence[Watcher]) -> None:
    for watcher in told:
        watcher.backward_ended()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers:
        if watcher.watches_optimizer(optimizer):
            watcher.step_begins(optimizer, _has_closure(args, kwargs))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers:
        if watcher.watches_optimizer(optimizer):
            watcher.step_ended(optimizer, _has_closure(args, kwargs))


def _has_closure(args: Any, kwargs: Any) -> bool:
    # the hooks get the optimizer itself as args[0] in torch 2.6 to 2.13
    return kwargs.get("closure") is not None or any(callable(a) and not _is_optimizer(a) for a in args)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _before_forward(module: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():  # a hook that writes would be traced into the compiled graph
        return
    for watcher in _forward_watchers:
        watcher.forward_begins(module, args)


def _after_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watcher in _forward_watchers:
        watcher.forward_ended(module, output)


def _after_registration(module: torch.nn.Module, name: str, value: Any) -> None:
    for watcher in _watchers:
        watcher.modules_changed()
