"""The records of a run, arranged for the rules: a rule is a function of this and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch.amp.grad_scaler import GradScaler

from tl_core import TrainingSetup, group_names, match_names, step_ranges
from tl_telemetry._events import Backward, Clip, Event, OptimizerStep, SchedulerStep, Warned
from tl_telemetry._facts import Facts
from tl_telemetry._options import Options
from tl_telemetry._record import StepRecord, grad_norms, total
from tl_telemetry._tensors import Tensors


class Evidence:
    """What was observed, and the options under which it is judged."""

    def __init__(self, facts: Facts, options: Options) -> None:
        self.facts = facts
        self.options = options
        self.records: list[StepRecord] = list(facts.recorder.records)
        if not facts.over:
            facts.read_end()

    @property
    def setup(self) -> TrainingSetup:
        return self.facts.setup

    @property
    def tensors(self) -> Tensors:
        return self.facts.tensors

    @cached_property
    def scalers(self) -> dict[str, GradScaler]:
        """The GradScalers by name: the setup's (``scaler``), others that it holds, and strangers that acted."""
        return dict(self.facts.recorder.scaling.scalers)

    @property
    def stranger_scalers(self) -> frozenset[str]:
        """The names of scalers that acted in the loop and that the setup does not hold."""
        return frozenset(self.facts.recorder.scaling.scalers.strangers)

    @property
    def autocast(self) -> frozenset[torch.dtype]:
        """The dtypes of autocast around forward passes that a backward pass followed, in the first steps."""
        return frozenset(self.facts.recorder.forward.autocast)

    def check_patterns(self) -> None:
        """Raise the error of a pattern, in ``ignore=`` or ``frozen=``, that matches nothing."""
        _ = self.ignored, self.asked_frozen

    @cached_property
    def asked_frozen(self) -> frozenset[str]:
        """Names of the parameters and buffers that the person wants not to change."""
        if not self.options.frozen:
            return frozenset()
        names = sorted(self.facts.start.names() | self.facts.end.names())
        return frozenset(match_names(names, self.options.frozen, argument="frozen"))

    @cached_property
    def ignored(self) -> frozenset[int]:
        """Indices of the parameters that the person left out."""
        names = [entry.name for entry in self.tensors.entries]
        matched = set(match_names(names, self.options.ignore, argument="ignore")) if self.options.ignore else set()
        return frozenset(i for i, name in enumerate(names) if name in matched)

    @property
    def told_steps(self) -> bool:
        """Whether somebody said where steps begin and end; else a record closes at each update."""
        return not self.facts.recorder.close_at_updates

    @property
    def duration(self) -> str:
        """How long the run was, in words: ``6 steps``, or ``this run`` where nobody told of steps."""
        return several(len(self.records), "step") if self.told_steps else "this run"

    @cached_property
    def steps(self) -> list[tuple[StepRecord, OptimizerStep]]:
        """Every optimizer step that had something to apply, in order."""
        return [(record, event) for record in self.records for event in record.optimizer_step_events if event.applied]

    @cached_property
    def events(self) -> list[tuple[StepRecord, Event]]:
        """Every act of the run, in order."""
        return [(record, event) for record in self.records for event in record.events]

    @cached_property
    def places(self) -> dict[int, int]:
        """The place in ``events`` of each act, by its id."""
        return {id(event): place for place, (_, event) in enumerate(self.events)}

    @cached_property
    def positions(self) -> dict[int, int]:
        """The place in ``steps`` of each event, by its id."""
        return {id(event): position for position, (_, event) in enumerate(self.steps)}

    @cached_property
    def steps_by_optimizer(self) -> dict[str, list[tuple[StepRecord, OptimizerStep]]]:
        grouped: dict[str, list[tuple[StepRecord, OptimizerStep]]] = {}
        for record, event in self.steps:
            grouped.setdefault(event.optimizer, []).append((record, event))
        return grouped

    @cached_property
    def backwards(self) -> dict[int, tuple[StepRecord, Backward]]:
        """Every backward pass by its number."""
        return {e.number: (r, e) for r in self.records for e in r.events if isinstance(e, Backward)}

    @cached_property
    def _steps_after(self) -> dict[int, list[tuple[StepRecord, OptimizerStep]]]:
        after: dict[int, list[tuple[StepRecord, OptimizerStep]]] = {}
        latest = 0
        for record in self.records:
            for event in record.events:
                if isinstance(event, Backward):
                    latest = event.number
                elif isinstance(event, OptimizerStep) and event.applied:
                    after.setdefault(latest, []).append((record, event))
        return after

    def steps_between(self, first: int, last: int) -> list[tuple[StepRecord, OptimizerStep]]:
        """Return the optimizer steps that ran after backward pass ``first`` and before ``last``."""
        return [pair for number in range(first, last) for pair in self._steps_after.get(number, ())]

    @cached_property
    def clips(self) -> list[tuple[StepRecord, Clip]]:
        return [(record, e) for record in self.records for e in record.events if isinstance(e, Clip)]

    @cached_property
    def clips_by_site(self) -> dict[tuple[str, str], list[tuple[StepRecord, Clip]]]:
        """Clips of each line of the person's code: (function, line)."""
        grouped: dict[tuple[str, str], list[tuple[StepRecord, Clip]]] = {}
        for record, clip in self.clips:
            grouped.setdefault((clip.function, clip.site), []).append((record, clip))
        return grouped

    @cached_property
    def scheduler_steps(self) -> list[tuple[StepRecord, SchedulerStep]]:
        return [(record, e) for record in self.records for e in record.events if isinstance(e, SchedulerStep)]

    @cached_property
    def warnings(self) -> list[tuple[StepRecord, Warned]]:
        return [(record, e) for record in self.records for e in record.events if isinstance(e, Warned)]

    @cached_property
    def filled(self) -> frozenset[int]:
        """Parameters that some backward pass reached."""
        return frozenset(i for _, event in self.backwards.values() for i in event.filled)

    @cached_property
    def graded(self) -> frozenset[int]:
        """Parameters that had a gradient at some optimizer step."""
        return frozenset(i for _, event in self.steps for i in event.graded)

    @cached_property
    def held(self) -> frozenset[int]:
        """Parameters that an optimizer of the setup, or one that stepped, holds."""
        return frozenset(i for stepper in self.facts.recorder.steppers for i in stepper.indices)

    @cached_property
    def own(self) -> frozenset[int]:
        """The model's parameters, and what the setup's optimizers hold; not what other optimizers brought along."""
        steppers = self.facts.recorder.steppers
        held = (steppers.indices_of(optimizer) for optimizer in self.setup.optimizers.values())
        in_model = (i for i, entry in enumerate(self.tensors.entries) if entry.in_model)
        return frozenset(in_model).union(*held)

    @cached_property
    def trains_other(self) -> bool:
        """Whether optimizers stepped, none of them over anything of the setup, and nothing of the setup moved."""
        held = {s.name for s in self.facts.recorder.steppers if not self.own.isdisjoint(s.indices)}
        return (
            bool(self.steps)
            and all(event.optimizer not in held for _, event in self.steps)
            and self.own.isdisjoint(self.moved)
        )

    @cached_property
    def moved(self) -> frozenset[int]:
        """Parameters whose values or versions changed over the run, by whatever means."""
        names = self.facts.end.moved_since(self.facts.start) | self.facts.end.touched_since(self.facts.start)
        return frozenset(i for i, entry in enumerate(self.tensors.entries) if entry.name in names)

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """The model's trainable parameters at the end of the run, without the ignored ones."""
        return tuple(
            i
            for i, entry in enumerate(self.tensors.entries)
            if entry.in_model and entry.tensor.requires_grad and i not in self.ignored
        )

    @cached_property
    def overflows(self) -> frozenset[int]:
        """Steps in which a GradScaler found an overflow: its scale fell."""
        fell = set()
        before: float | None = None
        for record in self.records:
            scale = record.loss_scale
            if scale is not None and before is not None and scale < before:
                fell.add(record.step)
            if scale is not None and before is None and self.setup.scaler is not None:
                # the scale exists from the first scale() on: a first step's fall shows against the initial scale
                initial = getattr(self.setup.scaler, "_init_scale", scale)
                if scale < initial and not self.facts.resumed:
                    fell.add(record.step)
            before = scale if scale is not None else before
        return frozenset(fell)

    def last_users(self, event: OptimizerStep, indices: Iterable[int]) -> set[str]:
        """Return the optimizers that were the last ones before ``event`` to use gradients of these parameters."""
        wanted, users = set(indices), set()
        for position in range(self.positions[id(event)] - 1, -1, -1):
            other = self.steps[position][1]
            if not wanted.isdisjoint(other.graded):
                users.add(other.optimizer)
                wanted.difference_update(other.graded)
                if not wanted:
                    break
        return users

    def norm_at(self, event: OptimizerStep, indices: Iterable[int]) -> float:
        """Return the L2 norm of the gradients of some of a step's parameters."""
        wanted = set(indices)
        return total([n for i, n in zip(event.graded, grad_norms(event), strict=True) if i in wanted])

    def shown(self, indices: Iterable[int]) -> str:
        """Return the names of parameters, grouped by module: ``encoder.* (12 tensors), head.weight``."""
        chosen = set(indices)
        everything = {i for i, entry in enumerate(self.tensors.entries) if entry.in_model}
        if len(chosen) > 1 and chosen == everything:
            return f"all {len(chosen)} parameters"
        return group_names(self.tensors.names(sorted(chosen)), [entry.name for entry in self.tensors.entries])

    def named(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.tensors.names(sorted(set(indices))))


def fresh_passes(event: OptimizerStep | Clip) -> set[int]:
    """Return the backward passes in its gradients that no earlier update of these parameters had used."""
    return {number for portion in event.portions for number in portion.unused}


def listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def at(steps: Iterable[int]) -> str:
    """Return steps as a range in words: ``step 3``, ``steps 0-4, 7``."""
    return step_ranges(sorted(set(steps)))


def telling(steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(steps)))


def number(value: float) -> str:
    """Return a figure as messages show it: three significant digits."""
    return f"{value:.3g}"


def several(count: int, noun: str) -> str:
    """Return ``1 update``, ``3 updates``, ``2 backward passes``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def recurs(count: int, of: int) -> bool:
    """Tell whether something that no correct loop does happened more than once, or often enough in a short run."""
    return count > 1 or enough(count, of)


def enough(count: int, of: int) -> bool:
    """Tell whether something happened often enough, of the times it could, to be how the loop works."""
    return count > 0 and count * 3 >= of
