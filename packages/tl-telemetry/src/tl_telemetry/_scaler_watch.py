"""Turns what a GradScaler does into events, in order with all other acts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from tl_core import TrainingSetup
from tl_telemetry._averages import Averages
from tl_telemetry._events import BY_HAND, Event, LossTerm, ScalerUpdate, SkippedStep, StateMoved, Unscaling
from tl_telemetry._figures import Figures, Span
from tl_telemetry._gradients import Gradients
from tl_telemetry._marks import WALKED_STEPS
from tl_telemetry._scaler import ScalerCall, Scalers, loss_scale, scaler_call
from tl_telemetry._sites import calling_site
from tl_telemetry._steppers import Steppers
from tl_telemetry._tensors import Tensors
from tl_telemetry._terms import SCALINGS, terms

# Steps in which the norms of scaled gradients are taken, beside those that the optimizers use.
MEASURED_STEPS = 64
# A number from here on that multiplies a loss may be a loss scale.
LEAST_SCALE = 64.0


class ScalerWatch:
    """What one recorder knows of the scalers of its setup, and of others that act on the setup's optimizers."""

    def __init__(
        self, setup: TrainingSetup, figures: Figures, gradients: Gradients, steppers: Steppers, tensors: Tensors
    ) -> None:
        self.scalers = Scalers(setup)
        self._setup = setup
        self._figures = figures
        self._gradients = gradients
        self._steppers = steppers
        self._tensors = tensors
        self._averages = Averages(setup)
        self._flag: object = None  # of the unscale_() that ran last
        self._flags: dict[torch.device, Tensor] = {}
        self._states: dict[str, object] = {}  # a scaler makes a new object of its optimizers' states at each update()
        self._updating: GradScaler | None = None
        self._searched: set[tuple[str, str]] = set()  # lines and names of terms below which no scale was found

    # -- losses -------------------------------------------------------------------------------------------------

    def terms(self, roots: Sequence[Any], site: str, num_steps: int) -> tuple[LossTerm, ...] | None:
        """Return the terms of what a backward pass begins at; None where no scaling is seen.

        Args:
            roots: what it begins at.
            site: the line that called it.
            num_steps: how many steps ended before: a graph is searched for a scale in the first ones only, and what was
                found of a term of a line holds in later ones.
        """
        self.scalers.refresh()
        early = num_steps < WALKED_STEPS
        nodes = [
            (node, root.output_nr)
            for root in roots
            if (node := getattr(root, "grad_fn", None) or getattr(root, "node", None)) is not None
        ]
        if not self.scalers.active and not (early and any(node.name() in SCALINGS for node, _ in nodes)):
            return None
        scales = self.scalers.scales()
        # a root of several elements begins with a gradient of its own, which a scale may have come with
        plain = all(getattr(root, "numel", lambda: 1)() == 1 for root in roots)
        found = [term for node, output in nodes for term in terms(node, output, scales, search=early)]
        if early:
            self._searched.update((site, term.node.name()) for term in found if term.scaler is None)
        return tuple(
            LossTerm(
                name=term.node.name(),
                dtype=term.dtype,
                scaler=term.scaler,
                factors=tuple(
                    self._figures.add([factor]) if isinstance(factor, Tensor) else factor for factor in term.factors
                ),
                # where a scale was not searched for, it may hide further down
                known=term.known
                and (term.scaler is not None or (plain and (site, term.node.name()) in self._searched)),
            )
            for term in found
        )

    def gradient(self, given: Sequence[Any]) -> Span | None:
        """Return the value that a backward pass begins with, where there is a scaler and it is one number."""
        first = given[0] if len(given) == 1 else None
        if not self.scalers.active or not isinstance(first, Tensor) or first.numel() != 1 or first.is_complex():
            return None
        return self._figures.add([first.detach().reshape(())])

    def norms(self, indices: tuple[int, ...], num_steps: int, terms: tuple[LossTerm, ...] | None = None) -> Span | None:
        """Return the norms of gradients in the first steps, with a scaler, or a loss that is scaled without one."""
        if num_steps >= MEASURED_STEPS or not (self.scalers.active or any(map(_may_be_scaled, terms or ()))):
            return None
        return self._figures.add(self._gradients.norms(indices))

    def caller(self) -> tuple[str | None, str]:
        """Return the scaler whose step() is running, and the line that called it or an optimizer's; with a scaler."""
        if not self.scalers.active:
            return None, ""
        call = scaler_call()
        return (None, calling_site()) if call is None else (self.scalers.name(call.scaler), call.site)

    # -- the scaler's acts --------------------------------------------------------------------------------------

    def goes_on(self, call: ScalerCall) -> bool:
        """Tell whether an ``unscale_`` is known already: it calls torch once for each device and dtype."""
        return call.flag is not None and call.flag is self._flag

    def unscaling(self, call: ScalerCall, num_steps: int) -> Unscaling:
        """Return the event of an ``unscale_`` that begins."""
        self._flag, self._flags = call.flag, {}
        self.scalers.acts_on(call.scaler, call.optimizer)
        _, graded = self._gradients.parted(self._held(call.optimizer))
        portions = self._gradients.portions(graded)
        edited = any(BY_HAND in portion.source for portion in portions)
        return Unscaling(
            optimizer=self._name(call.optimizer),
            scaler=self.scalers.name(call.scaler),
            in_step=call.in_step,
            site=call.site,
            scale=self._figures.copy(loss_scale(call.scaler)),
            found_inf=None,
            graded=graded,
            portions=portions,
            norms=self.norms(graded, num_steps),
            largest=self._largest(graded) if edited else None,
        )

    def unscaled(self, events: list[Event], found_inf: Tensor) -> None:
        """Add the flag that a call has set to the last event."""
        if events and isinstance(event := events[-1], Unscaling):
            self._flags[found_inf.device] = found_inf
            events[-1] = replace(event, found_inf=self._copies(self._flags.values()))

    def skipped(self, call: ScalerCall) -> SkippedStep:
        """Return the event of a ``scaler.step()`` that did not call the optimizer's."""
        state = call.scaler._per_optimizer_states[id(call.optimizer)]
        return SkippedStep(
            optimizer=self._name(call.optimizer),
            scaler=self.scalers.name(call.scaler),
            site=call.site,
            found_inf=self._copies(state["found_inf_per_device"].values()),
        )

    def update_begins(self, call: ScalerCall, scale: Tensor, found_inf: Tensor) -> ScalerUpdate:
        """Return the event of a scaler's ``update()`` that begins."""
        self._flag = None
        self._updating = call.scaler
        before, found = self._figures.copy(scale), self._figures.copy(found_inf)
        return ScalerUpdate(self.scalers.name(call.scaler), call.site, before, None, found)

    def updated(self, events: list[Event], scale: Tensor) -> None:
        """Add the scale that an update has set to the last event."""
        if events and isinstance(event := events[-1], ScalerUpdate):
            events[-1] = replace(event, after=self._figures.copy(scale))

    def look(self) -> list[ScalerUpdate]:
        """Return the updates since the last look that set a scale by hand: torch does not compute one in them."""
        found = []
        for name, scaler in self.scalers:
            states = getattr(scaler, "_per_optimizer_states", None)
            known = self._states.get(name)
            self._states[name] = states
            if known is None or known is states:
                continue
            if scaler is self._updating:
                self._updating = None  # that one was seen
            else:
                found.append(ScalerUpdate(name, "", None, self._figures.copy(loss_scale(scaler)), None))
        return found

    def look_at_averages(self) -> list[StateMoved]:
        """Return which averages were written to since the last look, where there is a scaler."""
        names = self._averages.look() if self.scalers.active else ()
        return [StateMoved(names)] if names else []

    def scale_at(self, graded: Sequence[int]) -> Span | None:
        """Return the loss scale if the gradients of these parameters are still scaled."""
        for optimizer in self._setup.optimizers.values():
            scaled = self.scalers.stage(optimizer) == "ready"
            if scaled and not self._steppers.indices_of(optimizer).isdisjoint(graded):
                return self._figures.copy(loss_scale(self.scalers.of(optimizer)))
        return None

    # -- what is read off ---------------------------------------------------------------------------------------

    def _name(self, optimizer: Any) -> str:
        for name, own in self._setup.optimizers.items():
            if own is optimizer:
                return name
        stepper = self._steppers.of(optimizer)
        return stepper.name if stepper is not None else f"{type(optimizer).__name__} that is not in the setup"

    def _held(self, optimizer: Any) -> tuple[int, ...]:
        index_of = self._tensors.index_of
        held = (index_of.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return self._gradients.shared(i for i in held if i is not None and i < len(self._gradients.tensors))

    def _largest(self, indices: tuple[int, ...]) -> Span | None:
        grads = self._gradients.grads(indices)
        if any(grad.layout is not torch.strided or grad.is_complex() or not grad.numel() for grad in grads):
            return None
        with torch.no_grad():
            return self._figures.add([grad.abs().amax().float() for grad in grads])

    def _copies(self, flags: Any) -> Span | None:
        copies = [flag.detach().clone().reshape(()) for flag in flags]
        return self._figures.add(copies) if copies else None


def _may_be_scaled(term: LossTerm) -> bool:
    # what a factor on a device is would have to be waited for
    return any(not isinstance(factor, float) or factor >= LEAST_SCALE for factor in term.factors)
