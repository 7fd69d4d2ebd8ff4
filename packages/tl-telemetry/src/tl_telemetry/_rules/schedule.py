"""Rules about learning rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._evidence import Evidence, at, several, telling


def scheduler_before_optimizer(run: Evidence) -> Iterator[Finding]:
    """See schedulers that step before their optimizer's first update."""
    if run.facts.resumed or run.overflows:
        return  # no first update to see; and a first update that a GradScaler skips is nobody's mistake
    for name, scheduler in run.setup.schedulers.items():
        optimizer = _optimizer_name(run, scheduler)
        steps = run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps
        own = [(record, event) for record, event in run.scheduler_steps if event.scheduler == name]
        if not own or not steps:
            continue
        order = {id(event): n for n, event in enumerate(e for record in run.records for e in record.events)}
        first = steps[0][1]
        # steps in which nothing is updated (micro-batches of an accumulation) say nothing of the order
        updating = {record.step for record, _ in steps}
        early = [(r, event) for r, event in own if order[id(event)] < order[id(first)] and r.step in updating]
        if len(early) != 1:  # several before the first update: it counts micro-batches, scheduler-too-often's business
            continue
        count = early[0][1].count
        record, _ = early[0]
        yield Finding(
            rule="scheduler-before-optimizer",
            seen=f"{name!r} stepped {several(count, 'time')} before the first update of {optimizer or 'any optimizer'!r} "
            f"(in {at([record.step])})",
            cause="scheduler.step() comes before optimizer.step(): the first value of the schedule is skipped, and every "
            "update uses the next one's",
            fix="call scheduler.step() after optimizer.step()",
            steps=telling([record.step, steps[0][0].step]),
            evidence={"steps_before": count},
        )


def scheduler_never_stepped(run: Evidence) -> Iterator[Finding]:
    """Note schedulers that never step while their optimizer does."""
    stepped = {event.scheduler for _, event in run.scheduler_steps}
    for name, scheduler in run.setup.schedulers.items():
        optimizer = _optimizer_name(run, scheduler)
        updates = len(run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps)
        if name in stepped or updates < 2:
            continue
        rates = sorted({lr for record in run.records for lr in record.lrs.get(optimizer or "", ())})
        stayed = f": the learning rate stayed at {', '.join(f'{lr:g}' for lr in rates)}" if rates else ""
        yield Finding(
            rule="scheduler-never-stepped",
            seen=f"{name!r} ({type(scheduler).__name__}) never stepped in {several(updates, 'update')}{stayed}",
            cause="its step() is called once an epoch, and no epoch ended in these steps; or it is never called",
            fix="nothing, if it steps once an epoch; else call its step() after optimizer.step(); assert_lr with the expected "
            "rate makes this a finding",
            evidence={"updates": updates},
        )


def scheduler_too_often(run: Evidence) -> Iterator[Finding]:
    """Note schedulers that step more often than there are updates."""
    for name, scheduler in run.setup.schedulers.items():
        optimizer = _optimizer_name(run, scheduler)
        updates = len(run.steps_by_optimizer.get(optimizer, []) if optimizer is not None else run.steps)
        own = [(record, event) for record, event in run.scheduler_steps if event.scheduler == name]
        count = sum(event.count for _, event in own)
        # updates that a GradScaler skipped may well have moved the schedule
        if updates < 2 or count < 1.5 * (updates + len(run.overflows)):
            continue
        yield Finding(
            rule="scheduler-too-often",
            seen=f"{name!r} stepped {several(count, 'time')} in {several(updates, 'update')} of {optimizer or 'the optimizers'!r}",
            cause="its step() is called for each micro-batch instead of for each update, or twice: the schedule runs ahead",
            fix="call scheduler.step() once an update, or make the schedule's length count what it is called for",
            steps=telling(record.step for record, _ in own),
            evidence={"scheduler_steps": count, "updates": updates},
        )


def _optimizer_name(run: Evidence, scheduler: object) -> str | None:
    """Return the name of the optimizer that a scheduler drives, if it says which."""
    driven = getattr(scheduler, "optimizer", None)
    for name, optimizer in run.setup.optimizers.items():
        if optimizer is driven:
            return name
    return next(iter(run.setup.optimizers)) if len(run.setup.optimizers) == 1 else None
