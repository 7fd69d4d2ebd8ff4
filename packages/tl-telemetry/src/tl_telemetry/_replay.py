"""Runs a loop again to name the operation that first made a non-finite value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tl_core import Batches, TrainingSetup, build_setup, preserve_rng, seed_everything

from ._sites import calling_site, in_torch, shown_site

# Make infinities or uninitialised memory on purpose, out of nothing or out of a mask.
_INNOCENT = re.compile(
    r"empty|full|fill|scalar_tensor|where|resize|new_|detach|isnan|isinf|isfinite|log_softmax_backward"
)


def first_nonfinite(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any],
    *,
    until: int,
    device: str | torch.device,
    seed: int,
) -> str | None:
    """Repeat a run up to step ``until`` and watch each operation of that step.

    Returns:
        The first operation with finite inputs and a non-finite output, with the line that called it, such as
        ``"SqrtBackward0 (the backward of train.py:31)"``; None when the repeated run did not show one.
    """
    batches = Batches(data, until + 1, device=device)
    watch = _FirstNonFinite()
    with preserve_rng():
        seed_everything(seed)
        setup = build_setup(make_setup, device)
        for index in range(until + 1):
            setup.step_index = index
            batch = batches.batch(index)
            if index < until:
                step(setup, batch)
                continue
            # records the forward line of each node, without anomaly mode's own check
            with torch.autograd.set_detect_anomaly(True, check_nan=False), watch:
                step(setup, batch)
    return watch.found


class _FirstNonFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (as above)
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch = self.found is None and not _INNOCENT.search(func._schema.name)
        finite_before = watch and all(map(_is_finite, _floating((args, kwargs))))
        output = func(*args, **kwargs)
        if finite_before and not all(map(_is_finite, _floating(output))):
            self.found = _describe(func)
        return output


def _floating(tree: Any) -> Iterator[Tensor]:
    for leaf in _pytree.tree_leaves(tree):
        if (
            isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and leaf.layout is torch.strided
        ):
            yield leaf


def _is_finite(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or bool(torch.isfinite(tensor).all())


def _describe(func: Any) -> str:
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return f"{func._schema.name.split('::')[-1].rstrip('_')} at {calling_site()}"
    lines = "".join(node.metadata.get("traceback_", []))
    sites = [
        shown_site(filename, int(lineno))
        for filename, lineno in re.findall(r'File "(.+?)", line (\d+)', lines)
        if not in_torch(filename) and "tl_telemetry" not in filename
    ]
    return f"{node.name()} (the backward of {sites[-1]})" if sites else f"{node.name()} in the backward pass"
