"""Reads what an optimizer's step works with and what it changes."""

from __future__ import annotations

import torch

from tl_telemetry._begun import Call, Seen
from tl_telemetry._events import OptimizerStep
from tl_telemetry._figures import Figures
from tl_telemetry._gradients import Gradients
from tl_telemetry._scaler import Scalers
from tl_telemetry._steppers import Stepper
from tl_telemetry._tensors import is_lazy
from tl_telemetry._updates import Updates


class StepReader:
    """Turns one call of ``step()`` into its event."""

    def __init__(self, figures: Figures, gradients: Gradients, scalers: Scalers, updates: Updates | None) -> None:
        self._figures = figures
        self._gradients = gradients
        self._scalers = scalers
        self._updates = updates

    def see(self, stepper: Stepper) -> Seen:
        """Read what the optimizer works with; before its step, or after a closure that made the gradients."""
        gradients = self._gradients
        tensors = gradients.tensors
        without, graded = gradients.parted(stepper.indices)
        return Seen(
            graded=graded,
            ungraded=gradients.shared(i for i in without if tensors[i].requires_grad),
            frozen=gradients.shared(i for i in graded if not tensors[i].requires_grad),
            norms=self._figures.add(gradients.norms(graded)),
            lrs=stepper.lrs(self._figures),
            scale=self._figures.copy(getattr(stepper.optimizer, "grad_scale", None)),
            found_inf=self._figures.copy(getattr(stepper.optimizer, "found_inf", None)),
            stage=self._scalers.stage(stepper.optimizer),
            portions=gradients.portions(graded),
            lost=gradients.lost(stepper.indices),
        )

    def with_shape(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the parameters that are no lazy ones."""
        return self._gradients.shared(i for i in indices if not is_lazy(self._gradients.tensors[i]))

    def event(self, call: Call, seen: Seen, closure: bool, backwards: int) -> OptimizerStep:
        """Return the event of a step that has ended."""
        stepper = call.stepper
        updates = unchanged = None
        low_precision: tuple[int, ...] = ()
        if self._updates is not None and call.copied is not None:
            with torch.no_grad():
                moved = self._updates.after(call.copied, seen.graded, stepper.count)
            updates = self._figures.add(moved.norms)
            low_precision = self._gradients.shared(moved.low_precision)
            unchanged = self._figures.add(moved.unchanged) if moved.unchanged else None
        stepper.count += 1
        return OptimizerStep(
            optimizer=stepper.name,
            graded=seen.graded,
            ungraded=seen.ungraded,
            frozen=seen.frozen,
            norms=seen.norms,
            updates=updates,
            unchanged=unchanged,
            low_precision=low_precision,
            lrs=seen.lrs,
            scale=seen.scale,
            found_inf=seen.found_inf,
            scaler_stage=seen.stage,
            portions=seen.portions,
            lost=seen.lost,
            closure=closure,
            evaluations=stepper.num_evaluations() - call.evaluations if closure else 0,
            backwards=backwards,
            scaler=call.scaler,
            site=call.site,
        )
