"""Rules about optimizer steps: missing ones, empty ones, and two where one is meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from tl_core import Finding
from tl_telemetry._events import OptimizerStep
from tl_telemetry._evidence import Evidence, at, enough, fresh_passes, several, telling
from tl_telemetry._record import StepRecord, total
from tl_telemetry._rules.gradients import without_gradient


def step_without_gradient(run: Evidence) -> Iterator[Finding]:
    """See optimizers that never had a gradient to step with."""
    idle = set(without_gradient(run).not_called)
    for name, steps in run.steps_by_optimizer.items():
        if any(event.graded or event.lost for _, event in steps):
            continue
        held = {i for s in run.facts.recorder.steppers if s.name == name for i in s.indices}
        frozen = run.facts.recorder.trainable.frozen_since.keys()
        indices = {i for _, event in steps for i in event.ungraded} | held & frozen
        indices -= run.ignored
        others = (i for _, event in run.steps if event.optimizer != name for i in event.graded)
        if not indices or (indices <= idle and not run.own.isdisjoint(others)):
            continue  # parts of the model that were not called have a note of their own: it is another one's turn
        hit = telling(record.step for record, _ in steps)
        cause, fix = _why_without(run, name, steps, indices)
        yield Finding(
            rule="step-without-gradient",
            seen=f"{name!r} stepped {several(len(steps), 'time')} ({at(hit)}), never with a gradient: it holds "
            f"{run.shown(indices)}",
            cause=cause,
            fix=fix,
            steps=hit,
            parameters=run.named(indices),
            evidence={"updates": len(steps)},
        )


def _why_without(
    run: Evidence, name: str, steps: list[tuple[StepRecord, OptimizerStep]], indices: set[int]
) -> tuple[str, str]:
    """Return the cause of steps without gradients, and the fix."""
    if not run.backwards:
        return "no backward pass ran in any step", "call backward() on the loss before step()"
    others = sorted({user for _, event in steps for user in run.last_users(event, indices)} - {name})
    if others:
        users = " and ".join(map(repr, others))
        return (
            f"{users} had stepped with their gradients, and they were cleared again, before {name!r} stepped",
            f"give each parameter to one optimizer, or give {name!r} a backward pass of its own before its step",
        )
    if not indices.isdisjoint(run.filled):
        return (
            "backward passes gave them gradients, but in no step in which it stepped, or after its step",
            "call step() after backward(), in the same steps",
        )
    since = run.facts.recorder.trainable.frozen_since
    if indices <= since.keys():
        when = at(since[i] for i in indices) if run.told_steps else "this run"
        return (
            f"the loop froze them (requires_grad_(False)) in {when}, as for another optimizer's turn, and never set "
            "them back",
            f"set requires_grad_(True) again before the forward pass whose gradients {name!r} steps with; if its turn "
            "only comes after this run, freeze it before the loop begins",
        )
    return (
        f"none of the {several(len(run.backwards), 'backward pass')} of the run reached them. Undecided why: the loss "
        "does not use them, uses them detached, or uses another copy of them",
        "build the optimizer from what the loss is computed with, or leave it out",
    )


def repeated_step(run: Evidence) -> Iterator[Finding]:
    """See an optimizer that steps again with gradients it has used already."""
    for name, steps in run.steps_by_optimizer.items():
        hit = [record.step for record, event in steps if _previous_user(run, event) == name]
        if not enough(len(hit), len(steps)):
            continue
        within = all(
            len([e for e in record.steps_of(name) if e.applied]) > 1 for record, _ in steps if record.step in hit
        )
        yield Finding(
            rule="repeated-step",
            seen=f"{name!r} stepped again with gradients that it had used already: no backward pass ran in between "
            f"({len(hit)} of {several(len(steps), 'update')}, {at(hit)})",
            cause="step() is called a second time in the same step, for example by a helper and again by the loop"
            if within
            else "step() is also called in steps in which no backward pass ran",
            fix="call step() once for each backward pass, or once for each accumulation cycle",
            steps=telling(hit),
            evidence={"updates": len(steps), "repeated": len(hit)},
        )


def stepped_by_two(run: Evidence) -> Iterator[Finding]:
    """See two optimizers that apply the same gradients in one step."""
    pairs: dict[tuple[str, str], tuple[list[int], set[int]]] = {}
    for record, event in run.steps:
        user = _previous_user(run, event)
        if user is not None and user != event.optimizer:
            steps, held = pairs.setdefault((user, event.optimizer), ([], set()))
            steps.append(record.step)
            held.update(i for portion in _used_up(event) for i in portion)
    for (first, second), (hit, held) in pairs.items():
        if not enough(len(hit), len(run.steps_by_optimizer[second])):
            continue
        yield Finding(
            rule="stepped-by-two",
            seen=f"{first!r} and {second!r} both stepped {run.shown(held)} with the same gradients ({at(hit)}): each "
            "of these updates was applied twice",
            cause="both optimizers hold these parameters, and no backward pass ran between their steps",
            fix="give each parameter to one optimizer",
            steps=telling(hit),
            parameters=run.named(held),
            evidence={"steps": len(hit)},
        )


def update_count(run: Evidence, expected: Mapping[str, int]) -> Iterator[Finding]:
    """See optimizers that stepped more or less often in the run than expected."""
    counts = {name: len(run.steps_by_optimizer.get(name, [])) for name in expected}
    wrong = {name: count for name, count in counts.items() if count != expected[name]}
    if not wrong:
        return
    parts = [f"{name!r} stepped {several(count, 'time')}, not {expected[name]}" for name, count in wrong.items()]
    reasons = [
        reason
        for name in wrong
        if (reason := _last_groups(run, name, expected[name]) or _passes_an_update(run, name, expected[name]))
    ]
    if run.overflows:
        reasons.append(f"a GradScaler skipped {several(len(run.overflows), 'update')} ({at(run.overflows)})")
    yield Finding(
        rule="update-count",
        seen=f"{' and '.join(parts)}, in {several(len(run.records), 'step')}",
        cause="; ".join(reasons)
        or "undecided: accumulation over another number of micro-batches than expected, or a last group that is "
        "dropped or added",
        fix="compare with tl_telemetry.num_updates(...) for this data set, batch size and accumulation",
        evidence={"counts": counts, "expected": dict(expected)},
    )


def _last_groups(run: Evidence, name: str, expected: int) -> str | None:
    """Say what became of incomplete accumulation groups, where their number, or completing them, explains the rest."""
    steps = run.steps_by_optimizer.get(name, [])
    taken = [fresh_passes(event) for _, event in steps]
    size, times = Counter(map(len, taken)).most_common(1)[0] if taken else (0, 0)
    if size < 2 or times < 2 or any(len(passes) > size for passes in taken) or run.overflows:
        return None  # no accumulation, none that shows, or one that a GradScaler disturbed
    used = _passes_of(run, name)
    into_updates = set().union(*taken)
    unused = [number for number in used if number not in into_updates]
    short = [record.step for (record, _), passes in zip(steps, taken, strict=True) if len(passes) < size]
    if short and not unused:
        seen = (
            f"incomplete groups are stepped: {len(short)} of the updates took fewer than {size} backward passes "
            f"({at(short)}); without them"
        )
        number, option = len(steps) - len(short), "drop"
    elif unused and not short:
        where = at(run.backwards[number][0].step for number in unused)
        dropped = "incomplete groups are dropped: " if unused[0] < used[-len(unused)] else ""
        seen = (
            f"{dropped}{several(len(unused), 'backward pass')} ({where}) went into no update, the others {size} an "
            "update; with an update of each such group"
        )
        # a group begins where the pass before went into an update
        begins = [number for before, number in pairwise([0, *used]) if number in unused and before not in unused]
        number, option = len(steps) + len(begins), "step"
    else:
        return None
    if expected == len(used) // size != number:
        seen, number, option = f"{seen.rpartition('; ')[0]}; completed to {size}", expected, "carry"
    if expected != number:
        return None
    return f"{seen} there would be {number}, as num_updates(last_group={option!r}) counts"


def _passes_of(run: Evidence, name: str) -> list[int]:
    """Return the numbers of the backward passes that reached an optimizer's parameters, in order."""
    indices = run.facts.recorder.steppers.indices_of(run.setup.optimizers[name])
    return [number for number, (_, event) in sorted(run.backwards.items()) if not indices.isdisjoint(event.filled)]


def _passes_an_update(run: Evidence, name: str, expected: int) -> str | None:
    """Say how many backward passes an update took and should have taken, where both are whole numbers."""
    steps = run.steps_by_optimizer.get(name, [])
    taken = {len(fresh_passes(event)) for _, event in steps}
    used = len(_passes_of(run, name))
    if len(taken) != 1 or not expected or not used or used % expected or {used // expected} == taken:
        return None
    return (
        f"each update of {name!r} took the gradients of {several(taken.pop(), 'backward pass')}; {expected} updates of "
        f"the {used} passes of this run would take {used // expected} each"
    )


def skipped_update(run: Evidence) -> Iterator[Finding]:
    """See steps without an update where one is due, and updates that change nothing."""
    if run.options.every is not None:
        yield from _due(run, run.options.every)
        return
    if not run.steps and not run.overflows:
        return  # never-stepped judges a run without any update
    skipped = sorted(run.overflows & {record.step for record in run.records if record.skipped})
    due = len(skipped) + len({record.step for record, _ in run.steps})
    # a scaler that starts too high skips its first steps while it adapts, as it should
    allowed = max(run.options.max_skipped, due // 2)
    if len(skipped) > allowed:
        yield Finding(
            rule="skipped-update",
            seen=f"the GradScaler skipped {len(skipped)} of {due} updates ({at(skipped)}): each time it found NaN or "
            f"Inf in the gradients, and its scale fell to {run.records[-1].loss_scale:g}",
            cause="the loss or the gradients overflow whatever the scale is: a value beyond float16's 65504, or NaN",
            fix="compute the part that overflows in float32 (autocast(enabled=False)), or use bfloat16",
            steps=telling(skipped),
            evidence={"skipped": len(skipped), "due": due},
        )


def _due(run: Evidence, every: int) -> Iterator[Finding]:
    due = [record for record in run.records if (record.step + 1) % every == 0]
    missed = [record.step for record in due if record.skipped]
    if len(missed) <= run.options.max_skipped:
        return
    later = _went_into(run, missed[0])
    overflowed = sorted(set(missed) & run.overflows)
    if overflowed:
        cause = f"the GradScaler found NaN or Inf in the gradients ({at(overflowed)})"
        fix = "lower its initial scale, or allow for it with max_skipped="
    elif later is not None:
        cause = (
            f"the update comes later: the gradients of step {missed[0]} went into that of step {later}. Undecided why: "
            "an epoch's last accumulation group is incomplete and leaks into the next epoch's first, or the loop "
            "counts its cycles from another step than the run's first"
        )
        fix = (
            "also step when an epoch's last batch is reached, with the losses of its group divided by the group's "
            "size, or count the steps through the epochs"
        )
    else:
        cause = "step() was not called in these steps"
        fix = "check the condition under which it is called, or pass the loop's real period as every="
    yield Finding(
        rule="skipped-update",
        seen=f"no optimizer stepped in {len(missed)} of the {len(due)} steps in which an update was due "
        f"(every={every}; {at(missed)})" + (f", {run.options.max_skipped} allowed" if run.options.max_skipped else ""),
        cause=cause,
        fix=fix,
        steps=telling(missed),
        evidence={"due": len(due), "skipped": len(missed)},
    )


def _went_into(run: Evidence, step: int) -> int | None:
    """Return the later step whose update used a backward pass of ``step``."""
    numbers = {number for number, (record, _) in run.backwards.items() if record.step == step}
    for record, event in run.steps:
        if record.step > step and any(not numbers.isdisjoint(portion.source) for portion in event.portions):
            return record.step
    return None


def _used_up(event: OptimizerStep) -> list[tuple[int, ...]]:
    """Return the parameters of the portions that hold nothing fresh."""
    return [portion.parameters for portion in event.portions if portion.source and not portion.fresh]


def _previous_user(run: Evidence, event: OptimizerStep) -> str | None:
    """Return which optimizer had used this step's gradients, if all of them that are not 0 were used before."""
    used = {i for portion in _used_up(event) for i in portion}
    # of several evaluations of a closure, the last one's gradients may be used ones (a line search)
    if event.backwards > 1 or not used or run.norm_at(event, used) == 0.0:
        return None
    fresh = set(event.graded) - used
    if fresh and total([n for i, n in zip(event.graded, event.norms.values(), strict=True) if i in fresh]) > 0.0:
        previous = _latest_before(run, event, used)
        # part of them fresh: only another optimizer's use says something (a stale rest is missing-zero-grad's)
        return previous if previous != event.optimizer else None
    return _latest_before(run, event, used)


def _latest_before(run: Evidence, event: OptimizerStep, indices: set[int]) -> str | None:
    for position in range(run.positions[id(event)] - 1, -1, -1):
        other = run.steps[position][1]
        if not indices.isdisjoint(other.graded):
            return other.optimizer
    return None
