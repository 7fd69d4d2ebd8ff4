"""Rules for loops that a framework's Trainer drives: what it does by itself, and the person's code does once more."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import Backward, OptimizerStep, SchedulerStep, SkippedStep
from tl_telemetry._evidence import Evidence, at, several, telling
from tl_telemetry._record import StepRecord
from tl_telemetry._rules.schedule import optimizer_name


def scheduler_stepped_twice(run: Evidence) -> Iterator[Finding]:
    """See schedulers that the Trainer steps, and code of the person's own steps too."""
    driver = run.setup.driver
    if not driver:
        return
    for name, scheduler in run.setup.schedulers.items():
        optimizer = optimizer_name(run, scheduler)
        calls = [_calls(record, name) for record in run.records]
        tried = [_tried(record, optimizer) for record in run.records]
        more = [record.step for record, n, u in zip(run.records, calls, tried, strict=True) if n > u]
        # a record that closes at its update may hold the call before it, and the last one holds that after it too
        doubled = [
            r.step for r, n, u in zip(run.records, calls, tried, strict=True) if n > max(u, 1) and run.told_steps
        ]
        # a Trainer steps a scheduler at most once an update, whatever that counts
        if not doubled and sum(calls) <= sum(tried):
            continue
        updates = sum(_updates(record, optimizer) for record in run.records)
        steps = doubled or more
        yield Finding(
            rule="scheduler-stepped-twice",
            seen=f"{name!r} ({type(scheduler).__name__}) stepped {several(sum(calls), 'time')} in "
            f"{several(updates, 'update')} ({at(steps)})",
            cause=f"{driver} steps it by itself, and so does code of your own: the schedule runs ahead",
            fix="take the call of its step() out of your code (a hook, a callback), and leave it to the Trainer",
            steps=telling(steps),
            evidence={"scheduler_steps": sum(calls), "updates": updates},
        )


def _calls(record: StepRecord, scheduler: str) -> int:
    events = record.events
    if record.step == 0:  # a schedule may be brought to its place before the first batch
        first = next((place for place, event in enumerate(events) if isinstance(event, Backward)), 0)
        events = events[first:]
    return sum(e.count for e in events if isinstance(e, SchedulerStep) and e.scheduler == scheduler)


def _updates(record: StepRecord, optimizer: str | None) -> int:
    counts = record.optimizer_steps
    return sum(counts.values()) if optimizer is None else counts.get(optimizer, 0)


def _tried(record: StepRecord, optimizer: str | None) -> int:
    """Count an optimizer's updates, with those that a GradScaler skipped and that of a batch without a loss."""
    tries = [e.optimizer for e in record.events if isinstance(e, (OptimizerStep, SkippedStep))]
    count = len(tries) if optimizer is None else tries.count(optimizer)
    return count or int(not any(isinstance(e, Backward) for e in record.events))
