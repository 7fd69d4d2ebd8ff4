"""The record of one step: its events, and the figures derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tl_telemetry._events import Backward, Clip, Event, OptimizerStep, Unscaling
from tl_telemetry._figures import Span
from tl_telemetry._tensors import Tensors


@dataclass(frozen=True, slots=True)
class ParameterFigures:
    """What one parameter went through in one step.

    Attributes:
        has_grad: whether it had a gradient when an optimizer stepped it (or, in a step without an update, whether a
            backward pass reached it).
        grad_norm_before_clip: L2 norm of its unscaled gradient before clipping; None without an update.
        grad_norm: L2 norm of the gradient that the update used; None without an update.
        update_norm: L2 norm of its change; None without an update or with ``track_updates=False``.
    """

    has_grad: bool
    grad_norm_before_clip: float | None = None
    grad_norm: float | None = None
    update_norm: float | None = None


class StepRecord:
    """What was observed in one step. Figures are read from the device when they are first asked for.

    Dicts are keyed by the optimizer's name in the setup; an optimizer that did not step in this step is missing
    from ``grad_norm``, ``grad_norm_before_clip`` and ``update_norm``.

    Attributes:
        step: the step's index.
        num_examples: first dimension of the batch's first tensor; None where the batch is not known.
        main_loss: name of the main loss among ``losses``; None where the loop gave none.
        events: the observed acts, in order.
    """

    def __init__(
        self,
        step: int,
        num_examples: int | None,
        events: tuple[Event, ...],
        tensors: Tensors,
        losses: dict[str, Span | float],
        main_loss: str | None,
        scale: Span | None,
        lrs: dict[str, tuple[float | Span, ...]],
    ) -> None:
        self.step = step
        self.num_examples = num_examples
        self.events = events
        self._tensors = tensors
        self._losses = losses
        self.main_loss = main_loss
        self._scale = scale
        self._lrs = lrs

    def __repr__(self) -> str:
        kinds = ", ".join(event.kind for event in self.events)
        return f"StepRecord(step={self.step}, events=[{kinds}])"

    def steps_of(self, optimizer: str) -> list[OptimizerStep]:
        """Return the optimizer's steps in this record, in order."""
        return [e for e in self.optimizer_step_events if e.optimizer == optimizer]

    @property
    def optimizer_step_events(self) -> list[OptimizerStep]:
        """The steps of all optimizers, in order; also those that a fused optimizer skipped itself."""
        return [event for event in self.events if isinstance(event, OptimizerStep)]

    @cached_property
    def losses(self) -> dict[str, float]:
        """What the step returned, by name."""
        return {name: read(value) for name, value in self._losses.items()}

    @property
    def loss(self) -> float | None:
        """The main loss (``"loss"``, else the first); None where the loop gave none."""
        return None if self.main_loss is None else read(self._losses[self.main_loss])

    @cached_property
    def loss_scale(self) -> float | None:
        """The GradScaler's scale after the step; None without one."""
        return None if self._scale is None else self._scale.value()

    @cached_property
    def grad_norm(self) -> dict[str, float]:
        """Total L2 norm of the unscaled gradients when the optimizer's ``step()`` ran, after clipping."""
        return {event.optimizer: total(grad_norms(event)) for event in self.optimizer_step_events}

    @cached_property
    def grad_norm_before_clip(self) -> dict[str, float]:
        """The same norm before clipping."""
        return {event.optimizer: total(self.norms_before_clip(event)) for event in self.optimizer_step_events}

    @cached_property
    def update_norm(self) -> dict[str, float]:
        """L2 norm of the parameter change made by the optimizer's step; empty with ``track_updates=False``."""
        return {e.optimizer: total(e.updates.values()) for e in self.optimizer_step_events if e.updates is not None}

    @cached_property
    def lrs(self) -> dict[str, tuple[float, ...]]:
        """Learning rate of each parameter group, as used by the step (as set at its end where none ran)."""
        rates = {name: tuple(map(read, lrs)) for name, lrs in self._lrs.items()}
        for event in self.optimizer_step_events:
            rates[event.optimizer] = tuple(map(read, event.lrs))
        return rates

    @cached_property
    def optimizer_steps(self) -> dict[str, int]:
        """How many times each optimizer stepped."""
        counts = dict.fromkeys(self._lrs, 0)
        for event in self.optimizer_step_events:
            if event.applied:
                counts[event.optimizer] = counts.get(event.optimizer, 0) + 1
        return counts

    @property
    def skipped(self) -> bool:
        """Whether no optimizer stepped."""
        return not any(self.optimizer_steps.values())

    @cached_property
    def nonfinite_grads(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient held NaN or Inf when an optimizer stepped."""
        return tuple(
            dict.fromkeys(
                self._tensors.name(index)
                for event in self.optimizer_step_events
                for index, norm in zip(event.graded, event.norms.values(), strict=True)
                if not math.isfinite(norm)
            )
        )

    @cached_property
    def parameters(self) -> dict[str, ParameterFigures]:
        """What each parameter went through, by name: those that a backward pass reached or an optimizer stepped."""
        figures: dict[str, ParameterFigures] = {}
        for event in self.events:
            if isinstance(event, Backward):
                for index in event.filled:
                    figures.setdefault(self._tensors.name(index), ParameterFigures(has_grad=True))
            elif isinstance(event, OptimizerStep):
                updates = [None] * len(event.graded) if event.updates is None else event.updates.values()
                rows = zip(event.graded, self.norms_before_clip(event), grad_norms(event), updates, strict=True)
                for index, before, norm, update in rows:
                    figures[self._tensors.name(index)] = ParameterFigures(True, before, norm, update)
                for index in event.ungraded:
                    figures[self._tensors.name(index)] = ParameterFigures(has_grad=False)
        return figures

    def norms_before_clip(self, step: OptimizerStep) -> list[float]:
        """Return the L2 norms of the step's gradients before any clip of theirs, in the order of ``step.graded``."""
        norms = dict(zip(step.graded, grad_norms(step), strict=True))
        clips: list[Clip] = []
        unscaled = step.scaler is not None or step.scale is not None
        for event in self.events:
            if event is step:
                break
            unscaled = unscaled or (isinstance(event, Unscaling) and event.optimizer == step.optimizer)
            if isinstance(event, Clip):
                clips.append(event)
            elif isinstance(event, Backward) and step.optimizer != event.in_step:
                # what a clip did before a later pass added to the same gradients says nothing of their sum
                clips = [clip for clip in clips if set(clip.graded).isdisjoint(event.filled)]
        for clip in reversed(clips):
            # of a step past the scaler, all norms are those of gradients that are still scaled
            divisor = 1.0 if clip.scale is None or not unscaled else clip.scale.value()
            for index, norm in zip(clip.graded, clip.norms.values(), strict=True):
                if index in norms:
                    norms[index] = norm / divisor
        return list(norms.values())


def read(value: float | Span) -> float:
    """Return a figure's value."""
    return value.value() if isinstance(value, Span) else value


def grad_norms(step: OptimizerStep) -> list[float]:
    """Return the L2 norms of the unscaled gradients that a step used, in the order of ``step.graded``."""
    values = step.norms.values()
    if step.scale is not None:
        scale = step.scale.value()
        values = [value / scale for value in values]
    return values


def total(norms: list[float]) -> float:
    """Return the L2 norm of the whole from the L2 norms of its parts."""
    return math.hypot(*norms) if all(map(math.isfinite, norms)) else sum(norms, 0.0)


def num_examples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((n for value in values if (n := num_examples(value)) is not None), None)
