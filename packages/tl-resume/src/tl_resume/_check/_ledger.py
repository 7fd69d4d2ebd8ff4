"""Which batches a loop drew by itself, and what its models were run on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tl_core import TrainingSetup
from tl_resume._check._content import content_digest
from tl_resume._check._draws import listen, unlisten

BEFORE_STEPS = -1


@dataclass(frozen=True)
class Drawn:
    """One batch that a DataLoader gave.

    Attributes:
        loader: The loader's name in the setup (``setup.loader``), or ``DataLoader``.
        content: The digest of the batch.
        indices: The indices of its samples, where a sampler gave them.
    """

    loader: str
    content: str
    indices: tuple[int, ...] | None


class Ledger:
    """Note, while the context is open, what the models of a setup are run on and what DataLoaders give.

    Only the thread that opens it is watched. Inputs are those of the outermost forward call of the model, of the
    modules in ``setup.state`` and in the setup's attributes, or of a direct child that the loop calls itself. What is
    traced into a compiled function cannot be seen; a compiled module can.

    Args:
        setup: The setup; its modules are looked up anew at each step.

    Attributes:
        inputs: By step, the digest of the inputs of each forward call. An empty tuple where there was none.
        drawn: By step, the batches that DataLoaders gave; those drawn before the first step stand at step -1.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.inputs: dict[int, tuple[str, ...]] = {}
        self.drawn: dict[int, tuple[Drawn, ...]] = {}
        self._setup: TrainingSetup | None = setup
        self._step = BEFORE_STEPS
        self._thread = 0
        self._running: list[nn.Module] = []
        self._hooked: dict[int, tuple[nn.Module, Callable[[], None]]] = {}

    def __enter__(self) -> Ledger:
        self._thread = threading.get_ident()
        try:
            self._hook_modules()
            listen(self._draw)
        except BaseException:
            self._unhook(list(self._hooked))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        unlisten(self._draw)
        self._unhook(list(self._hooked))
        self._running.clear()
        self._setup = None  # what was noted is kept for long, and must not keep the setup alive

    def begin_step(self, index: int) -> None:
        """Note what follows under a step.

        Args:
            index: The step's index.
        """
        self._step = index
        self.inputs.setdefault(index, ())
        self.drawn.setdefault(index, ())
        self._running.clear()
        self._hook_modules()

    def begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a watched module is called; called by the hooks."""
        if threading.get_ident() != self._thread or id(module) not in self._hooked:
            return
        # what activation checkpointing runs again in a backward pass is no input
        if not self._running and torch._C._current_graph_task_id() == -1:
            digest = content_digest(args, kwargs)
            self.inputs[self._step] = (*self.inputs.get(self._step, ()), digest)
        self._running.append(module)

    def ended(self, module: nn.Module) -> None:
        """Note that a watched module has returned or raised; called by the hooks."""
        if threading.get_ident() != self._thread:
            return
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth] is module:
                del self._running[depth:]
                return

    def _draw(self, iterator: Any, batch: Any, indices: tuple[int, ...] | None) -> None:
        assert self._setup is not None
        drawn = Drawn(_loader_name(self._setup, iterator), content_digest(batch), indices)
        self.drawn[self._step] = (*self.drawn.get(self._step, ()), drawn)

    def _hook_modules(self) -> None:
        assert self._setup is not None
        wanted = {id(module): module for root in _roots(self._setup) for module in _watched(root)}
        self._unhook([key for key in self._hooked if key not in wanted])
        for key, module in wanted.items():
            if key not in self._hooked:
                self._hooked[key] = (module, self._hook(module))

    def _unhook(self, keys: list[int]) -> None:
        for key in keys:
            self._hooked.pop(key)[1]()

    def _hook(self, module: nn.Module) -> Callable[[], None]:
        """Watch one module; returns what ends it."""
        if getattr(module, "_compiled_call_impl", None) is not None:
            return self._watch_compiled_call(module)
        try:
            before = module.register_forward_pre_hook(_Before(self), prepend=True, with_kwargs=True)
        except RuntimeError:  # a scripted module may refuse hooks
            return lambda: None
        # always_call: a forward that raises has ended too
        after = module.register_forward_hook(_After(self), always_call=True)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def _watch_compiled_call(self, module: Any) -> Callable[[], None]:
        # ``module.compile()``: hooks would be traced into the graph; the compiled call is an attribute of the instance,
        # which copies and pickles leave out.
        original = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self.begins(module, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self.ended(module)

        module._compiled_call_impl = call

        def put_back() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = original

        return put_back


class _Hook:
    """A hook that turns into one that does nothing where its module is copied or pickled.

    A module copied or pickled with a bound method or a local function among its hooks would take the ledger with it,
    or fail.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # compiled code must not depend on the watchers
            return
        self.ledger.begins(module, args, kwargs)


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.ledger.ended(module)


def _roots(setup: TrainingSetup) -> Iterator[nn.Module]:
    for value in (setup.model, *setup.state.values(), *vars(setup).values()):
        if isinstance(value, nn.Module):
            yield value


def _watched(root: nn.Module) -> Iterator[nn.Module]:
    """Give the modules of a tree whose calls can be outermost: a module and its direct children."""
    for module in _callable_parts(root):
        yield module
        if not _is_compiled(module):  # what is inside gets traced
            for child in module.children():
                yield from _callable_parts(child)


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Give a module, or the members of one that is only a container and is never called itself."""
    if _has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _callable_parts(child)


def _has_forward(module: nn.Module) -> bool:
    if _is_compiled(module) or isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _loader_name(setup: TrainingSetup, iterator: Any) -> str:
    for name, value in _named_values(setup):
        # an iterator does not know its loader, but it has the loader's sampler
        if isinstance(value, DataLoader) and value._index_sampler is iterator._index_sampler:
            return name
    return "DataLoader"


def _named_values(setup: TrainingSetup) -> Iterator[tuple[str, Any]]:
    """Give what the setup holds, at the top and one level below, under the paths that the person would write."""
    for name, value in list(vars(setup).items()):
        yield f"setup.{name}", value
    for name, value in list(vars(setup).items()):
        if isinstance(value, dict):
            yield from ((f"setup.{name}[{key!r}]", one) for key, one in list(value.items()))
        elif isinstance(value, (list, tuple)):
            yield from ((f"setup.{name}[{index}]", one) for index, one in enumerate(value))
        elif not isinstance(value, nn.Module):
            yield from ((f"setup.{name}.{key}", one) for key, one in list(getattr(value, "__dict__", {}).items()))
