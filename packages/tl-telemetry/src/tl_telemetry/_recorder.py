"""Turns what the taps tell into raw records: events in order, figures that stay on the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tl_core import TrainingSetup
from tl_telemetry import _taps
from tl_telemetry._begun import BackwardBegun, Call
from tl_telemetry._events import Backward, Clip, Event, GradientsCleared, OptimizerStep, SchedulerStep, Warned
from tl_telemetry._figures import Figures
from tl_telemetry._forward import Forward
from tl_telemetry._gradient_log import GradientAct, GradientLog
from tl_telemetry._gradient_log import Gradients as Grads
from tl_telemetry._gradients import Gradients
from tl_telemetry._marks import GraphMarks
from tl_telemetry._record import StepRecord
from tl_telemetry._scaler import loss_scale, scaler_call
from tl_telemetry._scaler_watch import ScalerWatch
from tl_telemetry._schedulers import Schedulers
from tl_telemetry._sites import calling_frame, calling_site, in_torch, is_running, raised_in_torch, shown_site
from tl_telemetry._step_reader import StepReader
from tl_telemetry._steppers import Stepper, Steppers
from tl_telemetry._tensors import Tensors
from tl_telemetry._trainable import Trainable
from tl_telemetry._updates import Updates


class Recorder:
    """Watches one setup in one thread. ``attach`` it, open and close steps, ``detach`` it."""

    def __init__(self, setup: TrainingSetup, *, track_updates: bool, log: GradientLog | None = None) -> None:
        self.setup = setup
        self.records: list[StepRecord] = []
        self.tensors = Tensors()
        self.gradients = Gradients()
        self.steppers = Steppers(setup, self.tensors)
        self.schedulers = Schedulers(setup)
        self.forward = Forward()
        self.marks = GraphMarks()
        self.watch_s = 0.0
        self.close_at_updates = True  # until somebody opens a step
        self.num_backwards = 0
        self.trainable = Trainable()
        self.built_optimizers: list[tuple[int, Stepper]] = []
        self._updates = Updates() if track_updates else None
        self._log = log
        self._clipped: Grads = {}
        self._figures = Figures()
        self.scaling = ScalerWatch(setup, self._figures, self.gradients, self.steppers, self.tensors)
        self._reader = StepReader(self._figures, self.gradients, self.scaling.scalers, self._updates)
        self._steps_begun = 0
        self._events: list[Event] = []
        self._updated = False  # in the step that runs, by an optimizer that is no stranger to the setup
        self._num_examples: int | None = None
        self._thread = threading.get_ident()
        self._backward_depth = 0
        self._stepping: list[Call] = []
        self._walk_needed = True
        self._begun: BackwardBegun | None = None
        self._walk()
        self.trainable.look(self.gradients.tensors, 0)

    # -- life ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        self.schedulers.look()
        self.scaling.look()
        self.scaling.look_at_averages()
        self.gradients.accept()
        _taps.attach(self)
        _taps.attach_forward(self)

    def detach(self) -> None:
        _taps.detach(self)
        _taps.detach_forward(self)
        self._keep_trailing_events()
        self._figures.close_row()
        self._figures.send_block()
        self._stepping = []

    def open_step(self, num_examples: int | None) -> None:
        self.close_at_updates = False
        self._num_examples = num_examples

    def last_act(self) -> str:
        """Say what was observed last in the step that runs."""
        return self._events[-1].kind.replace("_", " ") if self._events else "the start of the step"

    def close_step(self, losses: dict[str, Tensor | float], main: str | None) -> StepRecord:
        """End the step: look once more at gradients and schedulers, stack the figures, keep the record."""
        start = perf_counter()
        if self._walk_needed or self.gradients.seem_touched(self.gradients.everything):
            self._look_around()
        else:
            self._look_at_counters()
        self._events += self.scaling.look_at_averages()
        self.trainable.look(self.gradients.tensors, len(self.records))
        record = StepRecord(
            step=len(self.records),
            num_examples=self._num_examples,
            events=tuple(self._events),
            tensors=self.tensors,
            losses={name: self._figures.add([v]) if isinstance(v, Tensor) else float(v) for name, v in losses.items()},
            main_loss=main,
            scale=self._figures.copy(loss_scale(self.setup.scaler)),
            lrs={name: self.steppers.lrs(name, self._figures) for name in self.setup.optimizers},
        )
        self._figures.close_row()
        self.records.append(record)
        self._events = []
        self._updated = False
        self._num_examples = None
        self.marks.close_step()
        if self.forward.close_step():
            _taps.detach_forward(self)
        self.watch_s += perf_counter() - start
        return record

    def _keep_trailing_events(self) -> None:
        """Give what happened after the last record (a scheduler's step, a ``zero_grad``) to that record."""
        self._look_around()
        if not self.records and any(isinstance(event, Backward) for event in self._events):
            self.close_step({}, None)  # no update ever closed one
        elif self._events and self.records:
            self.records[-1].events += tuple(self._events)
        self._events = []

    # -- the taps -----------------------------------------------------------------------------------------------

    def watches_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def watches_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        # an optimizer that steps in a gradient hook on an accelerator runs in one of autograd's threads
        return self.watches_thread() or self.steppers.knows(optimizer)

    def modules_changed(self) -> None:
        self._walk_needed = True

    def forward_begins(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        start = perf_counter()
        if self.forward.begins(module, inputs) and self.watches_thread():
            self._follow_unregistered(module)
        self.watch_s += perf_counter() - start

    def forward_ended(self, module: torch.nn.Module, output: Any) -> None:
        if self.forward.ended(module) and self.watches_thread():
            self.marks.made(output)

    def warned(self, message: str, category: type[Warning], filename: str, lineno: int) -> None:
        from_torch = in_torch(filename) or raised_in_torch() or "Triggered internally at" in message
        self._events.append(Warned(message, category.__name__, shown_site(filename, lineno), from_torch))

    def backward_begins(self, roots: Sequence[Any], given: Sequence[Any], accumulate: bool) -> None:
        self._backward_depth += 1
        if self._backward_depth > 1 or not accumulate:
            return
        start = perf_counter()
        self._look_around()
        self.num_backwards += 1
        self.forward.backward_begins()
        gradients = self.gradients
        leftover = gradients.kept(gradients.everything)
        met = self.marks.meet(roots, self.num_backwards)
        repeated = gradients.holding(met.earlier) if met.earlier else ()
        site = calling_site()
        self._begun = BackwardBegun(
            site=site,
            root=self._figures.root(roots),
            connected=met.connected,
            leftover=leftover,
            leftover_norms=self._figures.add(self.gradients.norms(leftover)) if leftover else None,
            repeats=met.earlier if repeated else None,
            repeats_term=met.is_term,
            repeated=repeated,
            repeated_norms=self._figures.add(self.gradients.norms(repeated)) if repeated else None,
            dtype=getattr(roots[0], "dtype", None) if len(roots) == 1 else None,
            terms=self.scaling.terms(roots, site, len(self.records)),
            gradient=self.scaling.gradient(given),
            grads=self._log.copy(gradients) if self._log is not None else {},
        )
        self.watch_s += perf_counter() - start

    def backward_ended(self) -> None:
        self._backward_depth -= 1
        begun = self._begun
        if self._backward_depth or begun is None:
            return
        start = perf_counter()
        self._begun = None
        filled = self.gradients.fill(self.num_backwards)
        if begun.filled:  # some were cleared again inside of the pass
            filled = self.gradients.shared(sorted({*filled, *begun.filled}))
        self._events.append(
            Backward(
                number=self.num_backwards,
                site=begun.site,
                root=begun.root,
                filled=filled,
                connected=begun.connected,
                leftover=begun.leftover,
                leftover_norms=begun.leftover_norms,
                repeats=begun.repeats,
                repeats_term=begun.repeats_term,
                repeated=begun.repeated,
                repeated_norms=begun.repeated_norms,
                in_step=self._running_name(),
                dtype=begun.dtype,
                terms=begun.terms,
                gradient=begun.gradient,
                norms=self.scaling.norms(self.gradients.parted(filled)[1], len(self.records), begun.terms),
            )
        )
        self._log_act(begun.grads)
        self.watch_s += perf_counter() - start
        self._close_update()

    def _running_name(self) -> str | None:
        self._forget_raised()
        return self._stepping[-1].stepper.name if self._stepping else None

    def clip_begins(self, function: str, parameters: Sequence[Tensor], bound: float) -> None:
        start = perf_counter()
        self._look_around()
        gradients = self.gradients
        known = list(map(self.tensors.index_of.get, map(id, parameters)))
        followed = gradients.shared(i for i in known if i is not None)
        others = [p for i, p in zip(known, parameters, strict=True) if i is None] if None in known else []
        _, graded = gradients.parted(followed)
        self._events.append(
            Clip(
                function=function,
                site=calling_site(),
                bound=bound,
                given=len(parameters),
                with_gradient=len(graded) + sum(p.is_leaf and p.grad is not None for p in others),
                followed=followed,
                graded=graded,
                used=gradients.kept(graded),
                portions=gradients.portions(graded),
                norms=self._figures.add(self.gradients.norms(graded)),
                scale=self.scaling.scale_at(graded),
                in_step=self._running_name(),
            )
        )
        if self._log is not None:
            self._clipped = self._log.copy(gradients)
        self.watch_s += perf_counter() - start

    def clip_ended(self) -> None:
        self.gradients.accept()
        self._log_act(self._clipped)

    def step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        start = perf_counter()
        self._steps_begun += 1
        stepper = self.steppers.of(optimizer)
        if stepper is None:
            return
        self._forget_raised()
        inside = any(c.records and not c.stepper.index_set.isdisjoint(stepper.indices) for c in self._stepping)
        call = Call(stepper, calling_frame(), not inside, *self.scaling.caller())
        call.backwards = self.num_backwards
        if closure:
            call.evaluations = stepper.num_evaluations()
        self._stepping.append(call)
        if stepper.follow_new(self.gradients):
            self._walk_needed = True
        if len(self.tensors) > len(self.gradients.tensors):  # an optimizer over a model that the loop has just replaced
            self._walk()
        if stepper.is_new:
            stepper.is_new = False
            self.built_optimizers.append((len(self.records), stepper))
        if call.records:
            if self._backward_depth and self._begun is not None:
                self._begun.filled.update(self.gradients.fill(self.num_backwards, stepper.indices))
            else:
                self._look_around()
            if not closure:
                call.seen = self._reader.see(stepper)
                if self._log is not None:
                    call.grads = self._log.copy(self.gradients)
            if self._updates is not None:
                moving = call.seen.graded if call.seen is not None else self._reader.with_shape(stepper.indices)
                with torch.no_grad():
                    call.copied = self._updates.before(moving, self.gradients.tensors)
        self.watch_s += perf_counter() - start

    def step_ended(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        start = perf_counter()
        call = next((c for c in reversed(self._stepping) if c.stepper.optimizer is optimizer), None)
        if call is None:  # it began before this recorder did
            return
        del self._stepping[self._stepping.index(call) :]
        stepper = call.stepper
        if call.records:
            backwards = self.num_backwards - call.backwards
            if closure:
                if backwards > 1:
                    self.gradients.accept(stepper.indices)
                else:  # as in a plain step, what happened to the gradients since then is the loop's doing
                    self._look_around()
                call.seen = self._reader.see(stepper)
            if call.seen is not None:
                if self._log is not None and call.grads is None:
                    call.grads = self._log.copy(self.gradients)
                self._events.append(self._reader.event(call, call.seen, closure, backwards))
                self._log_act(call.grads or {}, is_step=True)
                self.gradients.use(stepper.indices, self.num_backwards)
                self._updated = self._updated or not self.steppers.is_stranger(stepper)
        self.watch_s += perf_counter() - start
        self._close_update()

    def unscale_begins(self) -> None:
        start = perf_counter()
        call = scaler_call()
        if call is not None and not self.scaling.goes_on(call):
            self._look_around()
            self._events.append(self.scaling.unscaling(call, len(self.records)))
        self.watch_s += perf_counter() - start

    def unscale_ended(self, found_inf: Tensor) -> None:
        self.scaling.unscaled(self._events, found_inf)

    def scaler_step_begins(self) -> int:
        return self._steps_begun

    def scaler_step_ended(self, before: int) -> None:
        start = perf_counter()
        call = scaler_call()
        if call is not None and before == self._steps_begun:
            self._look_around()
            self._events.append(self.scaling.skipped(call))
        self.watch_s += perf_counter() - start

    def scale_update_begins(self, scale: Tensor, found_inf: Tensor) -> None:
        start = perf_counter()
        call = scaler_call()
        if call is not None:
            self._look_around()
            self._events.append(self.scaling.update_begins(call, scale, found_inf))
        self.watch_s += perf_counter() - start

    def scale_update_ended(self, scale: Tensor) -> None:
        self.scaling.updated(self._events, scale)

    def _log_act(self, before: Grads, *, is_step: bool = False) -> None:
        """Keep the gradients around the act that has just been recorded, where somebody asked for them."""
        event = self._events[-1]
        if self._log is not None and isinstance(event, (Backward, Clip, OptimizerStep)):
            after = {} if is_step else self._log.copy(self.gradients)
            self._log.acts.append(GradientAct(len(self.records), event, before, after))

    def _forget_raised(self) -> None:
        """Drop calls of ``step()`` that raised: no hook tells of their end."""
        if self._stepping:
            self._stepping = [call for call in self._stepping if is_running(call.frame)]

    def _close_update(self) -> None:
        """End a record after an update, where nobody else says when a step ends."""
        if self._updated and self.close_at_updates and not self._stepping and not self._backward_depth:
            self.close_step({}, None)

    # -- what is read off ---------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self._walk_needed = False
        self.tensors.walk(self.setup)
        self.steppers.refresh()
        self.forward.follow(self.setup)
        new = self.tensors.entries[len(self.gradients.tensors) :]
        self.gradients.follow(entry.tensor for entry in new)

    def _follow_unregistered(self, module: torch.nn.Module) -> None:
        """Follow the parameters of a module that runs inside of the model and is no part of it (kept in a list)."""
        if self.tensors.add_unregistered(module, self.forward.around(module)):
            self._walk_needed = True

    def _look_around(self) -> None:
        """See what happened since the last act: gradients cleared or edited, schedulers stepped."""
        if self._walk_needed:
            self._walk()
        cleared, edited = self.gradients.look()
        if cleared or edited:
            self._events.append(GradientsCleared(cleared, edited))
        self._look_at_counters()

    def _look_at_counters(self) -> None:
        """See schedulers that stepped, and scales that were set by hand."""
        self._events += self.scaling.look()
        for name, count in self.schedulers.look():
            self._events.append(SchedulerStep(name, count))
