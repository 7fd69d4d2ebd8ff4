"""Switches off, while a step runs, what cannot be the same for a batch and for its micro-batches."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions with a flag that makes them random, and the value that makes them plain.
_DROPOUTS: dict[Any, tuple[str, Any]] = {
    getattr(F, name): ("training", False)
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "rrelu",
    )
}
_DROPOUTS[F.scaled_dot_product_attention] = ("dropout_p", 0.0)
_DROPOUTS[F.multi_head_attention_forward] = ("dropout_p", 0.0)

# The same of torch's own functions, which have no signatures, and of their operators, which exported modules call: the
# argument's place and name.
_TORCH_DROPOUTS = {
    function: place
    for name, place in {
        "dropout": (2, "train"),
        "native_dropout": (2, "train"),
        "alpha_dropout": (2, "train"),
        "feature_dropout": (2, "train"),
        "feature_alpha_dropout": (2, "train"),
        "rrelu": (3, "training"),
    }.items()
    for own in (name, f"{name}_")
    if hasattr(torch, own)  # native_dropout has no form that works in place
    for function in (getattr(torch, own), getattr(torch.ops.aten, own), getattr(torch.ops.aten, own).default)
}
_RNNS = frozenset(getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class Met:
    """What was met while steps ran.

    Attributes:
        batch_norm: whether a normalisation by the statistics of the batch ran.
        low: the low-precision dtypes of results.
    """

    batch_norm: bool = False
    low: set[torch.dtype] = field(default_factory=set)


class Switch(TorchFunctionMode):
    """Turns dropout off, and batch statistics to fixed ones, whatever calls them.

    Modules call the same functions of torch, so that one place sees them all; nothing is changed in the modules.
    """

    def __init__(self, met: Met, *, no_dropout: bool, fixed_statistics: bool) -> None:
        super().__init__()
        self._met = met
        self._no_dropout = no_dropout
        self._fixed = fixed_statistics

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._no_dropout:
            args, kwargs = _without_dropout(func, args, kwargs)
        if func is F.batch_norm:
            kwargs = self._batch_norm(args, kwargs)
            args = ()
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _LOW_PRECISION:
            self._met.low.add(result.dtype)
        return result

    def __exit__(self, kind: Any, error: Any, traceback: TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        # an error of the person's code passes without the frames of this file
        while traceback is not None:
            following = traceback.tb_next
            while following is not None and following.tb_frame.f_code.co_filename == __file__:
                following = following.tb_next
            traceback.tb_next = following
            traceback = following

    def _batch_norm(self, args: Any, kwargs: Any) -> dict[str, Any]:
        given = _bound(F.batch_norm, args, kwargs)
        if not given.get("training", False):
            return given
        self._met.batch_norm = True
        if self._fixed:
            given["training"] = False
            if given.get("running_mean") is None:
                channels = given["input"].shape[1]
                given["running_mean"] = given["input"].new_zeros(channels, dtype=torch.float32)
                given["running_var"] = given["input"].new_ones(channels, dtype=torch.float32)
        return given


def _without_dropout(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if func in _DROPOUTS:
        name, value = _DROPOUTS[func]
        return (), {**_bound(func, args, kwargs), name: value}
    if func in _TORCH_DROPOUTS:
        place, name = _TORCH_DROPOUTS[func]
        if len(args) > place:
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: False}
    if func in _RNNS:
        # (input, hx, weights, biases, num_layers, dropout, ...), packed (data, batch_sizes, hx, weights, ...)
        place = 5 if isinstance(args[3], bool) else 6
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, kwargs


_signatures: dict[Any, inspect.Signature] = {}


def _bound(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    if func is F.scaled_dot_product_attention:  # a builtin without a signature
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return {**dict(zip(names, args, strict=False)), **kwargs}
    signature = _signatures.get(func)
    if signature is None:
        signature = _signatures[func] = inspect.signature(func)
    return dict(signature.bind(*args, **kwargs).arguments)


@contextmanager
def switched(
    met: Met, *, no_dropout: bool, frozen: tuple[nn.Module, ...] = (), fixed: bool = False
) -> Iterator[Switch]:
    """Make ready to run steps without dropout and, where asked, with fixed batch statistics.

    Args:
        met: what was met is noted there.
        no_dropout: whether dropout is off.
        frozen: modules that run in eval mode, whatever mode the step puts them in.
        fixed: whether batch statistics are replaced by fixed ones.

    Yields:
        The switch. It is on within ``with switch:``, and in backward passes.
    """
    with ExitStack() as stack:
        for module in frozen:
            before, after = _in_eval_mode(module)
            # before the hooks of a spectral norm, which look at the mode too
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        switch = Switch(met, no_dropout=no_dropout, fixed_statistics=fixed)
        stack.enter_context(_reaching(switch))
        yield switch


_lock = threading.Lock()
_installed: ExitStack | None = None
_num_switches = 0


class _Here(threading.local):
    """The switches of a thread, the outermost first."""

    def __init__(self) -> None:
        self.switches: list[Switch] = []


_here = _Here()


@contextmanager
def _reaching(switch: Switch) -> Iterator[None]:
    """Let this thread's switch reach into compiled code and backward passes.

    Both take replacing something of the whole process: the first switch does, and the last one puts it back, in
    whatever order the threads leave.
    """
    global _installed, _num_switches
    with _lock:
        if _installed is None:
            _installed = _install()
        _num_switches += 1
    _here.switches.append(switch)
    try:
        yield
    finally:
        _here.switches.remove(switch)
        with _lock:
            _num_switches -= 1
            if not _num_switches:
                _installed.close()
                _installed = None


def _install() -> ExitStack:
    stack = ExitStack()
    # compiled code would have to be compiled again for these calls
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(_on_in_backward())
    return stack


@contextmanager
def _on_in_backward() -> Iterator[None]:
    """Keep switches on within backward passes: checkpointing runs forward passes there, and hooks run."""
    # a function mode is off while a function that it was told of runs, and backward() is one
    engine: Any = torch.autograd
    original = engine._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for switch in _here.switches:
                stack.enter_context(switch)
            return original(*args, **kwargs)

    engine._engine_run_backward = run_backward
    try:
        yield
    finally:
        if engine._engine_run_backward is run_backward:
            engine._engine_run_backward = original


def _in_eval_mode(module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
    modes: list[bool] = []

    def before(_module: nn.Module, _args: Any) -> None:
        modes.append(module.training)
        module.training = False

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        module.training = modes.pop()

    return before, after
