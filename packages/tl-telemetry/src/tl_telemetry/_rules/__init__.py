"""The rules: functions from evidence to findings, in the order in which causes come before their consequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tl_core import Finding
from tl_telemetry._evidence import Evidence
from tl_telemetry._rules import (
    averages,
    bounds,
    cleared,
    clipping,
    coverage,
    discards,
    driven,
    gradients,
    horizon,
    leaks,
    schedule,
    state,
    steps,
    unstepped,
    updates,
)

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    coverage.coverage,
    coverage.unregistered,
    coverage.beside_model,
    gradients.loss_not_connected,
    bounds.non_finite,
    cleared.zeroed_before_step,
    discards.discarded_gradient,
    leaks.missing_zero_grad,
    leaks.backward_twice,
    leaks.leaked_gradient,
    state.loss_broadcast,
    gradients.no_gradient,
    gradients.zero_gradient,
    steps.step_without_gradient,
    steps.stepped_by_two,
    steps.repeated_step,
    unstepped.never_stepped,
    updates.lr_zero,
    updates.update_rounds_away,
    updates.no_update,
    updates.frozen_moved,
    clipping.clip_after_step,
    clipping.clip_misses,
    driven.scheduler_stepped_twice,
    schedule.scheduler_before_optimizer,
    schedule.orphan_scheduler,
    state.frozen_buffer_moved,
    averages.ema_never_updated,
    state.graph_kept_alive,
    bounds.diverging,
    bounds.grad_norm_exceeded,
    steps.skipped_update,
    bounds.loss_not_decreasing,
    # notes
    gradients.never_ran,
    coverage.frozen_parameter,
    coverage.several_optimizers,
    clipping.clip_every_update,
    updates.group_lr_zero,
    schedule.scheduler_never_stepped,
    schedule.scheduler_too_often,
    horizon.schedule_horizon,
    averages.static_state,
    state.torch_warning,
)
