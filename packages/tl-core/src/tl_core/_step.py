"""The training step for loops that have only a loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from tl_core._losses import loss_of, split_losses
from tl_core._setup import TrainingSetup

LossFunction = Callable[[nn.Module, Any], Any]
Step = Callable[[TrainingSetup, Any], Any]


def choose_step(step: Step | None, loss_fn: LossFunction | None) -> Step:
    """Return the step to train with: the person's, or the standard step around their loss function.

    Args:
        step: ``step(setup, batch)``, or None.
        loss_fn: ``loss_fn(model, batch)``, or None.

    Raises:
        TypeError: Neither or both are given, or what is given is no function.
    """
    if (step is None) == (loss_fn is None):
        got = "neither" if step is None else "both"
        raise TypeError(
            f"pass either step or loss_fn, got {got}: step(setup, batch) trains, "
            "loss_fn(model, batch) only computes the loss"
        )
    given, name = (step, "step") if step is not None else (loss_fn, "loss_fn")
    if not callable(given):
        raise TypeError(f"{name} must be a function, got {type(given).__name__}")
    return step if step is not None else standard_step(cast(LossFunction, loss_fn))


def standard_step(loss_fn: LossFunction, *, accumulation_steps: int = 1, max_grad_norm: float | None = None) -> Step:
    """Make a training step out of a loss function.

    The step divides the loss by ``accumulation_steps`` and runs backward, through the setup's GradScaler if it has
    one. Where ``setup.step_index`` ends a cycle it unscales and clips, steps every optimizer, updates the scaler,
    zeroes the gradients and steps every scheduler (not when the scaler skipped the update).

    Args:
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a tensor with one element, a dict of named ones whose
            ``"loss"``, else the first, is trained, or the output of a transformers model that was given labels.
        accumulation_steps: Micro-batches per update.
        max_grad_norm: L2 norm over all parameters of all optimizers to which gradients are clipped; None for none.

    Returns:
        ``step(setup, batch)``, which returns what ``loss_fn`` returned, detached and not divided.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or out of range.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function loss_fn(model, batch), got {type(loss_fn).__name__}")
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise TypeError(f"accumulation_steps must be an int, got {type(accumulation_steps).__name__}")
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
    if max_grad_norm is not None:
        if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
            raise TypeError(f"max_grad_norm must be a number or None, got {type(max_grad_norm).__name__}")
        if math.isnan(max_grad_norm) or max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be greater than 0, got {max_grad_norm}")

    def step(setup: TrainingSetup, batch: Any) -> Any:
        result = loss_of(loss_fn(setup.model, batch), setup.step_index, source="loss_fn()")
        losses, main = split_losses(result, setup.step_index, source="loss_fn()")
        if main is None:
            raise TypeError(f"loss_fn() returned a {type(result).__name__} at step {setup.step_index}, and no loss")
        loss = result[main] if isinstance(result, Mapping) else result
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
            what = "is detached from the model" if isinstance(loss, torch.Tensor) else f"is a {type(loss).__name__}"
            raise ValueError(
                f"the loss that loss_fn() returned at step {setup.step_index} {what}: "
                "return the tensor that the model's output was turned into, without detach() or item()"
            )
        if accumulation_steps > 1:
            loss = loss / accumulation_steps
        (loss if setup.scaler is None else setup.scaler.scale(loss)).backward()
        if (setup.step_index + 1) % accumulation_steps == 0:
            _update(setup, max_grad_norm, losses[main])
        return losses if isinstance(result, Mapping) else losses[main]

    return step


def _update(setup: TrainingSetup, max_grad_norm: float | None, loss: torch.Tensor | float) -> None:
    optimizers = list(setup.optimizers.values())
    scaler = setup.scaler
    if max_grad_norm is not None:
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        distinct = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        nn.utils.clip_grad_norm_(distinct.values(), max_grad_norm)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("standard_step cannot drive LBFGS, whose step needs a closure: pass a step of your own")
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    updated = True
    if scaler is not None:
        scale = scaler.get_scale()
        scaler.update()
        updated = bool(scaler.get_scale() >= scale)  # the scale falls when, and only when, gradients overflowed
    for optimizer in optimizers:
        optimizer.zero_grad()
    if updated:
        for scheduler in setup.schedulers.values():
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(cast(float, loss))
            else:
                scheduler.step()
