"""Rules about learning rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tl_core import Finding
from tl_telemetry._events import Backward, SchedulerStep
from tl_telemetry._evidence import Evidence, at, several, telling
from tl_telemetry._record import StepRecord, read
from tl_telemetry._schedulers import belong, driven_by, drives, is_orphan, unwrapped

ORPHANED = (
    "the optimizer that steps was built after the scheduler, which still holds the one before: nothing drives its rates"
)


def orphan_scheduler(run: Evidence) -> Iterator[Finding]:
    """See schedulers that go on stepping for an optimizer that does not, while nothing moves its successor's rate."""
    for name, scheduler in run.setup.schedulers.items():
        if (found := orphan(run, name)) is None:
            continue
        calls, updates, kind = found
        if (left := next(_undriven(run, scheduler, updates), None)) is None:
            continue
        successor, rates, of_successor = left
        stepped = f" any more, and stepped {several(updates, 'time')}" if updates else ", and never stepped"
        yield Finding(
            rule="orphan-scheduler",
            seen=f"{name!r} ({type(scheduler).__name__}) stepped {several(calls, 'time')}, but the {kind} that it "
            f"drives is not in the setup{stepped}; the learning rate of {successor!r} stayed at "
            f"{', '.join(f'{rate:g}' for rate in rates)} in {several(of_successor, 'update')}",
            cause=ORPHANED,
            fix="build the scheduler for the optimizer that steps, or change that one in place (add_param_group)",
            steps=telling(record.step for record, event in run.scheduler_steps if event.scheduler == name),
            evidence={"scheduler_steps": calls, "updates": updates, "successor": successor},
        )


def _undriven(run: Evidence, scheduler: object, updates: int) -> Iterator[tuple[str, tuple[float, ...], int]]:
    """Yield (name, its rates, their number of updates) of the driven optimizer's successors whose rates nothing moves.

    A successor holds some of its parameters: a scheduler over others may serve as a clock for anything.
    ``updates`` is how often the driven optimizer stepped: under its successor's name, if that took its place.
    """
    driven = driven_by(scheduler)
    held, steppers = _held(driven), run.facts.recorder.steppers
    before = next((stepper.name for stepper in steppers if belong(driven, stepper.optimizer)), None)
    for name, optimizer in run.setup.optimizers.items():
        driven_too = any(drives(other, optimizer) for other in run.setup.schedulers.values())
        if held.isdisjoint(_held(optimizer)) or driven_too:
            continue
        own = run.steps_by_optimizer.get(name, [])[updates if name == before else 0 :]
        rates = {tuple(map(read, event.lrs)) for _, event in own}
        if len(own) > 1 and len(rates) == 1:
            yield name, tuple(dict.fromkeys(next(iter(rates)))), len(own)


def _held(optimizer: object) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}


def orphan(run: Evidence, name: str) -> tuple[int, int, str] | None:
    """Return (its steps, its optimizer's steps, its optimizer's class) of a scheduler that drives another optimizer."""
    scheduler = run.setup.schedulers[name]
    steppers = run.facts.recorder.steppers
    calls = sum(event.count for _, event in run.scheduler_steps if event.scheduler == name)
    if not is_orphan(scheduler, run.setup, steppers):
        return None
    driven = driven_by(scheduler)
    updates = sum(stepper.count for stepper in steppers if belong(driven, stepper.optimizer))
    # phases of a training have an optimizer and a scheduler each
    return (calls, updates, type(driven).__name__) if calls > updates + 1 else None


def scheduler_before_optimizer(run: Evidence) -> Iterator[Finding]:
    """See schedulers that step before their optimizer's first update."""
    if run.facts.resumed or run.overflows:
        return  # no first update to see; and a first update that a GradScaler skips is nobody's mistake
    if run.setup.driver:
        return  # its order is right, and what others step is scheduler-stepped-twice's business
    for name, scheduler in run.setup.schedulers.items():
        # torch's schedulers set their first value when they are built; one written by hand, or one that waits for a
        # metric, may well be asked before the first update
        inner = unwrapped(scheduler)
        if not isinstance(inner, LRScheduler) or isinstance(inner, ReduceLROnPlateau):
            continue
        if orphan(run, name):
            continue
        optimizer = optimizer_name(run, scheduler)
        steps = run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps
        own = [(record, event) for record, event in run.scheduler_steps if event.scheduler == name]
        if not own or not steps:
            continue
        order = {id(event): n for n, event in enumerate(e for record in run.records for e in record.events)}
        first = steps[0][1]
        # steps in which nothing is updated (micro-batches of an accumulation) say nothing of the order
        updating = {record.step for record, _ in steps}
        early = [(r, event) for r, event in own if order[id(event)] < order[id(first)] and r.step in updating]
        # several before the first update, or one between its backward passes: it counts micro-batches, which is
        # scheduler-too-often's business
        if len(early) != 1 or _between_passes(early[0][0], early[0][1]):
            continue
        count = early[0][1].count
        record, _ = early[0]
        yield Finding(
            rule="scheduler-before-optimizer",
            seen=f"{name!r} ({type(scheduler).__name__}) stepped {several(count, 'time')} before the first update of "
            f"{repr(optimizer) if optimizer else 'any optimizer'} ({at([record.step])})",
            cause="scheduler.step() comes before optimizer.step(): the first value of the schedule is never used, "
            "and every update uses a later one",
            fix="call scheduler.step() after optimizer.step()",
            steps=telling([record.step, steps[0][0].step]),
            evidence={"steps_before": count},
        )


def _between_passes(record: StepRecord, event: SchedulerStep) -> bool:
    """Tell whether backward passes ran before and after a scheduler's step in its record (which may be an update's)."""
    place = record.events.index(event)
    return all(any(isinstance(e, Backward) for e in part) for part in (record.events[:place], record.events[place:]))


def scheduler_never_stepped(run: Evidence) -> Iterator[Finding]:
    """Note schedulers that never step while their optimizer does."""
    stepped = {event.scheduler for _, event in run.scheduler_steps}
    for name, scheduler in run.setup.schedulers.items():
        optimizer = optimizer_name(run, scheduler)
        updates = len(run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps)
        if name in stepped or updates < 2:
            continue
        rates = sorted({lr for record in run.records for lr in record.lrs.get(optimizer or "", ())})
        used = {record.lrs[optimizer] for record in run.records if optimizer in record.lrs} if optimizer else set()
        if len(used) > 1 and not isinstance(unwrapped(scheduler), LRScheduler):
            continue  # somebody's own class that counts where nobody sees it: the rates move
        stayed = f": the learning rate stayed at {', '.join(f'{lr:g}' for lr in rates)}" if rates else ""
        yield Finding(
            rule="scheduler-never-stepped",
            seen=f"{name!r} ({type(scheduler).__name__}) never stepped in {several(updates, 'update')}{stayed}",
            cause="undecided: its step() is called once an epoch, and no epoch ended in these steps; or it is never "
            "called",
            fix="nothing, if it steps once an epoch; else call its step() after optimizer.step(); assert_lr with the "
            "expected rate makes this a finding",
            evidence={"updates": updates},
        )


def scheduler_too_often(run: Evidence) -> Iterator[Finding]:
    """Note schedulers that step more often than there are updates."""
    if run.setup.driver:
        return  # nobody but the Trainer is to step it: scheduler-stepped-twice is about that
    for name, scheduler in run.setup.schedulers.items():
        optimizer = optimizer_name(run, scheduler)
        updates = len(run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps)
        own = [(record, event) for record, event in run.scheduler_steps if event.scheduler == name]
        count = sum(event.count for _, event in own)
        # updates that a GradScaler skipped may well have moved the schedule
        if updates < 2 or count < 1.5 * (updates + len(run.overflows)) or orphan(run, name):
            continue
        yield Finding(
            rule="scheduler-too-often",
            seen=f"{name!r} ({type(scheduler).__name__}) stepped {several(count, 'time')} in "
            f"{several(updates, 'update')} of {repr(optimizer) if optimizer else 'the optimizers'} "
            f"({at(record.step for record, _ in own)})",
            cause=_why_often(own, optimizer),
            fix="call scheduler.step() once an update, or make the schedule's length count what it is called for",
            steps=telling(record.step for record, _ in own),
            evidence={"scheduler_steps": count, "updates": updates},
        )


def _why_often(own: list[tuple[StepRecord, SchedulerStep]], optimizer: str | None) -> str:
    without_update = sum(
        event.count
        for record, event in own
        if not (any(record.optimizer_steps.values()) if optimizer is None else record.optimizer_steps.get(optimizer))
    )
    if without_update:
        return (
            f"its step() is called in steps without an update too ({without_update} of the calls): the schedule runs "
            "ahead, unless its length counts these steps (micro-batches, or another optimizer's updates)"
        )
    return (
        "its step() is called more than once an update: the schedule runs ahead, unless its length counts these calls"
    )


def optimizer_name(run: Evidence, scheduler: object) -> str | None:
    """Return the name of the optimizer that a scheduler drives, if it says which."""
    for name, optimizer in run.setup.optimizers.items():
        if drives(scheduler, optimizer):
            return name
    return next(iter(run.setup.optimizers)) if len(run.setup.optimizers) == 1 else None
