"""The rule about gradients that are cleared after their backward pass and before any update could apply them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from tl_core import Finding
from tl_telemetry._events import Backward, GradientsCleared, OptimizerStep
from tl_telemetry._evidence import Evidence, at, several, telling
from tl_telemetry._record import StepRecord, total


def zeroed_before_step(run: Evidence) -> Iterator[Finding]:
    """See gradients that a backward pass made and that were gone when their optimizer stepped."""
    for name, steps in run.steps_by_optimizer.items():
        yield from _all_of_them(run, name, steps)
        yield from _a_part(run, name, steps)


def _all_of_them(run: Evidence, name: str, steps: list[tuple[StepRecord, OptimizerStep]]) -> Iterator[Finding]:
    hit = [(r, e) for r, e in steps if e.lost and total(e.norms.values()) == 0.0]
    if not hit or len(hit) * 2 < len(steps):
        return
    lost = {i for _, event in hit for i in event.lost}
    kept_tensors = any(event.graded for _, event in hit)
    what = "0 in every element" if kept_tensors else "None"
    at_most = ", so that at most weight decay and momentum move the weights" if kept_tensors else ""
    filled = "a backward pass had filled them just before"
    cause = (
        "they were cleared between backward() and step(), as by a zero_grad() in the wrong place: the update has no "
        f"gradient to apply{at_most}"
    )
    fix = "move zero_grad() before backward(), or after step()"
    if all(map(partial(_comes_first, run), hit)):
        filled = "a backward pass had filled them in the step before"
        cause = (
            "step() comes before backward(): the next step's zero_grad() clears what a backward pass makes before "
            f"step() is called again{at_most}"
        )
        fix = "call step() after backward() and before the next zero_grad()"
    yield Finding(
        rule="zeroed-before-step",
        seen=f"the gradients of {run.shown(lost)} were {what} when {name!r} stepped, although {filled} ({len(hit)} of "
        f"{several(len(steps), 'update')}, {at(r.step for r, _ in hit)})",
        cause=cause,
        fix=fix,
        steps=telling(r.step for r, _ in hit),
        parameters=run.named(lost),
        evidence={"updates": len(steps), "without_gradient": len(hit)},
    )


def _comes_first(run: Evidence, pair: tuple[StepRecord, OptimizerStep]) -> bool:
    """Tell whether the step came before its record's backward pass, and that of an earlier record was lost."""
    record, event = pair
    made = _made_and_cleared(run, event, event.lost)
    later = record.events[record.events.index(event) :]
    return (
        run.told_steps
        and made is not None
        and made[0] < record.step
        and any(isinstance(e, Backward) and not set(event.lost).isdisjoint(e.filled) for e in later)
    )


def _a_part(run: Evidence, name: str, steps: list[tuple[StepRecord, OptimizerStep]]) -> Iterator[Finding]:
    """See parameters whose gradients are lost in nearly every update, while the optimizer's others have theirs."""
    hits: dict[int, list[tuple[StepRecord, str, bool]]] = {}
    kept_tensors: set[int] = set()
    for record, event in steps:
        norms = dict(zip(event.graded, event.norms.values(), strict=True))
        missed = [i for i in event.lost if norms.get(i, 0.0) == 0.0]
        if not missed or total(list(norms.values())) == 0.0:
            continue
        for i in missed:
            made = _made_and_cleared(run, event, (i,))
            # who clears a part of what a pass made does it on purpose (a last layer that is held at first)
            if made is not None and (set(made[1].filled) & run.held) <= made[2]:
                hits.setdefault(i, []).append((record, made[1].site, made[0] < record.step))
                kept_tensors.update({i} & norms.keys())
    applied = _applied(run)
    lost = [
        i
        for i, hit in hits.items()
        if len(hit) > 1
        and len(hit) * 4 >= len(steps) * 3
        and i not in applied | run.ignored
        # without a gradient it moved by hand
        and not (i in run.moved and i not in run.graded)
    ]
    if not lost:
        return
    told = [entry for i in lost for entry in hits[i]]
    hit = {record.step: record for record, _, _ in told}
    count = max(len(hits[i]) for i in lost)
    sites = " and ".join(sorted({site for _, site, _ in told}))
    cause, fix = _why(run, [before for _, _, before in told])
    others = [i for i in applied if i not in lost and any(i in event.graded for _, event in steps)]
    what = "0 in every element" if kept_tensors & set(lost) else "None"
    yield Finding(
        rule="zeroed-before-step",
        seen=f"the gradients of {run.shown(lost)} were {what} when {name!r} stepped, although the backward pass at "
        f"{sites} had filled them ({count} of {several(len(steps), 'update')}, {at(hit)}): no update applied them, "
        f"while {several(len(others), 'other parameter')} had theirs",
        cause=cause,
        fix=fix,
        steps=telling(hit),
        parameters=run.named(lost),
        evidence={"updates": len(steps), "without_gradient": count, "with_gradient": len(others)},
    )


def _why(run: Evidence, made_before: list[bool]) -> tuple[str, str]:
    """Return the cause of a lost part, and the fix; told from the step in which its gradients were made."""
    after = "this backward pass runs after step(), and the next zero_grad() clears what it made before another update"
    between = (
        "they were cleared between this backward pass and step(), by a zero_grad() that another backward pass follows"
    )
    before = "call zero_grad() once an update, before its first backward()"
    if run.told_steps and all(made_before):
        return after, "call this backward() before step(), or add its loss to the other one"
    if run.told_steps and not any(made_before):
        return between, before
    return f"undecided: {between}, or {after}", f"{before}, and all of them before step()"


def _applied(run: Evidence) -> frozenset[int]:
    """Return the parameters that some step had a gradient for that was not 0."""
    return frozenset(
        i for _, event in run.steps for i, n in zip(event.graded, event.norms.values(), strict=True) if n != 0.0
    )


def _made_and_cleared(
    run: Evidence, step: OptimizerStep, lost: Iterable[int]
) -> tuple[int, Backward, frozenset[int]] | None:
    """Return the last pass before ``step`` that filled some of these, its step, and what was cleared with them."""
    wanted = set(lost)
    cleared: frozenset[int] = frozenset()
    for place in range(run.places[id(step)] - 1, -1, -1):
        record, event = run.events[place]
        if isinstance(event, GradientsCleared) and not wanted.isdisjoint((*event.cleared, *event.edited)):
            cleared = frozenset((*event.cleared, *event.edited))
        elif isinstance(event, Backward) and not wanted.isdisjoint(event.filled):
            return record.step, event, cleared
    return None
