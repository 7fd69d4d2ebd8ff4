"""Hands optimizers other gradients than the step made: what these make of the weights can then be seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tl_accum._runs import Run
from tl_accum._updates import Update


@contextmanager
def replaced_gradients(run: Run, made: Mapping[str, list[Update]]) -> Iterator[None]:
    """Let the optimizers of a run apply the gradients of other updates, one for one, while the context is open.

    Args:
        run: the run whose optimizers step.
        made: the updates, by optimizer, in order.
    """
    waiting: dict[str, deque[torch.Tensor]] = {}
    for updates in made.values():
        for update in updates:
            for name, gradient in update.applied.items():
                waiting.setdefault(name, deque()).append(gradient)

    def replace(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        tensors = run.training.facts.tensors
        scale = getattr(optimizer, "grad_scale", None)  # a fused step unscales by itself
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            index = tensors.index_of.get(id(parameter))
            if index is None or parameter.grad is None or not waiting.get(tensors.name(index)):
                continue
            gradient = waiting[tensors.name(index)].popleft()
            if parameter.grad.layout is torch.strided and gradient.shape == parameter.grad.shape:
                with torch.no_grad():
                    parameter.grad.copy_(gradient if scale is None else gradient * float(scale))

    disable: Any = torch.compiler.disable  # untyped in torch
    handle = register_optimizer_step_pre_hook(disable(replace))
    try:
        yield
    finally:
        handle.remove()
