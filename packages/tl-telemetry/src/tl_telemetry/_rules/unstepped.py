"""The rule about optimizers that never step, and what steps instead of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tl_core import Finding
from tl_telemetry._events import Backward, GradientsCleared
from tl_telemetry._evidence import Evidence, fresh_passes, several, telling
from tl_telemetry._record import StepRecord


class Unstepped(NamedTuple):
    """An optimizer of the setup that never steps although it should."""

    name: str
    reached: list[int]  # its parameters that backward passes filled
    passes: list[tuple[StepRecord, Backward]]  # those passes, without the ones that a GradScaler found an overflow in
    instead: str | None  # another optimizer that steps after each of these passes, and after passes of its own too


def never_stepped(run: Evidence) -> Iterator[Finding]:
    """See optimizers that never step although their parameters get gradients and nobody else moves them."""
    if run.options.every is not None and len(run.records) < run.options.every:
        return  # the person says that no update was due yet
    for name, reached, passes, instead in unstepped(run):
        sites = " and ".join(sorted({event.site for _, event in passes}))
        cause = (
            "undecided: step() is not called on this optimizer, the condition under which it is called is never true "
            "(`i % k == k`), or the run is shorter than one of its cycles"
        )
        fix = f"call step() on {name!r}"
        if instead is not None:
            cause = f"after the backward pass that fills them ({sites}), {instead!r} is stepped, not {name!r}"
            fix = f"call step() on {name!r} there, instead of {instead!r}"
        elif run.told_steps:
            fix += f"; if it is due only after more than {several(len(run.records), 'step')}, run more"
        yield Finding(
            rule="never-stepped",
            seen=f"{name!r} never stepped in {run.duration}, although {several(len(passes), 'backward pass')} gave "
            f"gradients to {run.shown(reached)}; nothing else moved them",
            cause=cause,
            fix=fix,
            steps=telling(record.step for record, _ in passes),
            parameters=run.named(reached),
            evidence={
                "optimizer": name,
                "steps": len(run.records),
                "backward_passes": len(passes),
                "instead": instead,
            },
        )


def unstepped(run: Evidence) -> list[Unstepped]:
    """List the optimizers that never step although they should."""
    stepped = {i for _, event in run.steps for i in event.graded}
    found = []
    for name, optimizer in run.setup.optimizers.items():
        if name in run.steps_by_optimizer:
            continue
        indices = run.facts.recorder.steppers.indices_of(optimizer) - run.ignored
        reached = sorted(indices & run.filled)
        if not reached or not stepped.isdisjoint(indices) or not run.moved.isdisjoint(reached):
            continue
        passes = [(r, e) for r, e in run.backwards.values() if not indices.isdisjoint(e.filled)]
        if run.overflows:
            # a GradScaler that finds an overflow keeps optimizers from stepping: what it let others step counts
            passes = [(r, e) for r, e in passes if r.step not in run.overflows and not r.skipped]
        if len(passes) < 2 or (not run.steps and _accumulates(run, indices)):
            continue
        found.append(Unstepped(name, reached, passes, _instead(run, passes)))
    return found


def _accumulates(run: Evidence, indices: frozenset[int]) -> bool:
    """Tell whether all gradients are still there at the end: the run may be shorter than an accumulation cycle."""
    return not any(
        isinstance(event, GradientsCleared) and not indices.isdisjoint((*event.cleared, *event.edited))
        for record in run.records
        for event in record.events
    )


def _instead(run: Evidence, passes: list[tuple[StepRecord, Backward]]) -> str | None:
    """Return the optimizer that steps right after each of these passes, if it also steps after passes of its own."""
    after = [{event.optimizer for _, event in run.steps_between(e.number, e.number + 1)} for _, e in passes]
    names = set.intersection(*after)
    if len(names) != 1 or set.union(*after) != names:
        return None
    (name,) = names
    numbers = {event.number for _, event in passes}
    return name if any(numbers.isdisjoint(fresh_passes(event)) for _, event in run.steps_by_optimizer[name]) else None


def in_others_stead(run: Evidence) -> frozenset[int]:
    """Return the ids of steps that an optimizer takes after passes after which another one should step."""
    return frozenset(
        id(event)
        for found in unstepped(run)
        if found.instead is not None
        for _, event in run.steps_by_optimizer[found.instead]
        if not fresh_passes(event).isdisjoint({backward.number for _, backward in found.passes})
    )
