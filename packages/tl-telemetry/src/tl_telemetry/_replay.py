"""Runs a loop again to name the operations that first made non-finite values."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tl_core import Batches, TrainingSetup, build_setup, preserve_rng, seed_everything
from tl_telemetry._sites import calling_site, in_this_package, in_torch, shown_site
from tl_telemetry._tensors import shown_name

# Make infinities or uninitialised memory on purpose, out of nothing or out of a mask.
_INNOCENT = re.compile(
    r"empty|full|fill|scalar_tensor|where|resize|new_|detach|isnan|isinf|isfinite|log_softmax_backward"
)


@dataclass(frozen=True)
class Made:
    """An operation that made non-finite values.

    Attributes:
        operation: its name, as torch has it: ``"log"``, ``"SqrtBackward0"``.
        site: the line that called it (of a backward node: the line of its forward).
        backward: whether it ran in a backward pass.
        nan: whether its output holds NaN (else only infinities).
        dtype: its output's dtype.
        empty: whether it had no element to work with.
        given: whether one of its arguments was a number that is NaN or Inf.
        module: the name of the model's module whose forward pass ran it; empty in none, and in a backward pass.
        above: whether its output holds +Inf (or NaN), and not only -Inf, as a mask does.
        recorded: whether its result has a graph, so that a loss may depend on it.
    """

    operation: str
    site: str
    backward: bool
    nan: bool
    dtype: torch.dtype
    empty: bool
    given: bool
    module: str = ""
    above: bool = True
    recorded: bool = True

    def __str__(self) -> str:
        if self.backward:
            return self.operation + (f" (the backward of {self.site})" if self.site else "")
        return f"{self.operation} at {self.site}"


@dataclass(frozen=True)
class Origin:
    """Where the non-finite values of a repeated step came from.

    Attributes:
        batch: which NaN the batch held: ``"batch[0] holds 3 NaN in 96 elements"``; empty for none.
        made: operations that were the first to make non-finite values of finite ones: in a forward pass (or an
            update), and in a backward pass.
        turned: operations that were the first to make NaN of infinities, in the same order.
        ended: the first operation of the forward pass that made finite values of what was not; empty for none.
    """

    batch: str
    made: tuple[Made, ...]
    turned: tuple[Made, ...]
    ended: str = ""


def first_nonfinite(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any],
    *,
    until: int,
    device: str | torch.device,
    seed: int,
) -> Origin:
    """Repeat a run up to step ``until`` and watch each operation of that step."""
    batches = Batches(data, until + 1, device=device)
    with preserve_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself has shown them
        seed_everything(seed)
        setup = build_setup(make_setup, device)
        for index in range(until):
            setup.step_index = index
            step(setup, batches.batch(index))
        setup.step_index = until
        batch = batches.batch(until)
        held = _nan_in(batch)
        watch = _FirstNonFinite({id(module): shown_name(name) for name, module in setup.model.named_modules()})
        # records the forward line of each node, without anomaly mode's own check
        with torch.autograd.set_detect_anomaly(True, check_nan=False), watch.modules(), watch:
            step(setup, batch)
    return Origin(held, tuple(watch.made.values()), tuple(watch.turned.values()), watch.ended)


class _FirstNonFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names  # of the model's modules, by id
        self._running: list[str] = []
        # by whether it ran in a backward pass
        self.made: dict[bool, Made] = {}
        self.turned: dict[bool, Made] = {}
        self.ended = ""

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module of the model runs."""

        def begins(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():  # what is written there would be traced
                self._running.append(self._names.get(id(module), ""))

        def ended(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and self._running:
                self._running.pop()

        handles = (
            nn_module.register_module_forward_pre_hook(begins),
            nn_module.register_module_forward_hook(ended, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _describe(self, func: Any, inputs: list[Tensor], output: Tensor, *, empty: bool, given: bool) -> Made:
        made = _describe(func, output, empty=empty, given=given)
        module = next(filter(None, reversed(self._running)), "")
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        return made if made.backward else replace(made, module=module, recorded=recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        backward = torch._C._current_autograd_node() is not None
        innocent = bool(_INNOCENT.search(func._schema.name)) or (backward in self.made and backward in self.turned)
        waits = not backward and backward in self.made and not self.ended
        if innocent and not waits:
            return func(*args, **kwargs)
        inputs = list(_floating((args, kwargs)))
        had_nan = any(map(_has_nan, inputs))
        finite = not had_nan and all(map(_is_finite, inputs))
        empty = any(tensor.numel() == 0 for tensor in inputs)
        given = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in _pytree.tree_leaves((args, kwargs)))
        output = func(*args, **kwargs)
        made = list(_floating(output))
        if waits and not finite and made and all(map(_is_finite, made)):
            self.ended = _name(func)
        if innocent or had_nan:
            return output
        for tensor in made:
            # an Inf that was written into a forward pass is there on purpose, unless it makes NaN
            meant = given and not backward and not _has_nan(tensor)
            if finite and backward not in self.made and not _is_finite(tensor) and not meant:
                self.made[backward] = self._describe(func, inputs, tensor, empty=empty, given=given)
            if not finite and backward not in self.turned and _has_nan(tensor):
                self.turned[backward] = self._describe(func, inputs, tensor, empty=empty, given=given)
        return output


def _floating(tree: Any) -> Iterator[Tensor]:
    for leaf in _pytree.tree_leaves(tree):
        if (
            isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and leaf.layout is torch.strided
            and leaf.device.type != "meta"
        ):
            yield leaf


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(tensor).any())


def _nan_in(batch: Any) -> str:
    """Say which of a batch's tensors holds NaN."""
    for path, leaf in _pytree.tree_leaves_with_path(batch):
        for tensor in _floating(leaf):
            count = int(torch.isnan(tensor).sum())
            if count:
                return f"batch{_pytree.keystr(path)} holds {count} NaN in {tensor.numel()} elements"
    return ""


def _name(func: Any) -> str:
    """Return an operation's name: ``"mul"``."""
    return str(func._schema.name).split("::")[-1].rstrip("_")


def _describe(func: Any, output: Tensor, *, empty: bool, given: bool) -> Made:
    nan = _has_nan(output)
    node = torch._C._current_autograd_node()
    name = _name(func)
    if node is None:
        above = bool((output == math.inf).any()) if not output.is_complex() else True
        return Made(name, calling_site(), False, nan, output.dtype, empty, given, above=above or nan)
    if "AccumulateGrad" in node.name():  # a leaf: its gradient is added up, or passes through hooks
        what = "the accumulation of gradients" if name == "add" else f"{name} at {calling_site()} (a gradient hook)"
        return Made(what, "", True, nan, output.dtype, empty, given)
    metadata: Any = node.metadata
    lines = "".join(metadata.get("traceback_", []))
    sites = [
        shown_site(filename, int(lineno))
        for filename, lineno in re.findall(r'File "(.+?)", line (\d+)', lines)
        if not in_torch(filename) and not in_this_package(filename)
    ]
    return Made(node.name(), sites[-1] if sites else "", True, nan, output.dtype, empty, given)
