"""Rules about optimizer steps: missing ones, empty ones, and two where one is meant."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import OptimizerStep
from tl_telemetry._evidence import Evidence, at, enough, several, telling
from tl_telemetry._record import StepRecord, total


def step_without_gradient(run: Evidence) -> Iterator[Finding]:
    """See optimizers that never had a gradient to step with."""
    for name, steps in run.steps_by_optimizer.items():
        if any(event.graded or event.lost for _, event in steps):
            continue
        indices = {i for _, event in steps for i in event.ungraded} - run.ignored
        if not indices:
            continue
        hit = telling(record.step for record, _ in steps)
        yield Finding(
            rule="step-without-gradient",
            seen=f"{name!r} stepped {several(len(steps), 'time')} and none of its {len(indices)} trainable tensors had a "
            f"gradient ({at(hit)})",
            cause="no backward pass reached its parameters before it stepped: they belong to something that the loss does "
            "not use, or backward() is missing",
            fix="check which model the optimizer was built for, and that the loss's backward() runs before step()",
            steps=hit,
            parameters=run.named(indices),
            evidence={"updates": len(steps)},
        )


def repeated_step(run: Evidence) -> Iterator[Finding]:
    """See an optimizer that steps again with gradients it has used already."""
    for name, steps in run.steps_by_optimizer.items():
        hit = [record.step for record, event in steps if _previous_user(run, record, event) == name]
        if not enough(len(hit), len(steps)):
            continue
        yield Finding(
            rule="repeated-step",
            seen=f"{name!r} stepped again with gradients that it had used already: no backward pass ran in between "
            f"({len(hit)} of {several(len(steps), 'update')}, {at(hit)})",
            cause="step() is called twice for one backward pass (once by a helper or a trainer, once by hand)",
            fix="call step() once for each backward pass (or accumulation cycle)",
            steps=telling(hit),
            evidence={"updates": len(steps), "repeated": len(hit)},
        )


def stepped_by_two(run: Evidence) -> Iterator[Finding]:
    """See two optimizers that apply the same gradients in one step."""
    pairs: dict[tuple[str, str], tuple[list[int], set[int]]] = {}
    for record, event in run.steps:
        user = _previous_user(run, record, event)
        if user is not None and user != event.optimizer:
            steps, held = pairs.setdefault((user, event.optimizer), ([], set()))
            steps.append(record.step)
            held.update(i for portion in _used_up(event) for i in portion)
    for (first, second), (hit, held) in pairs.items():
        if not enough(len(hit), len(run.steps_by_optimizer[second])):
            continue
        yield Finding(
            rule="stepped-by-two",
            seen=f"{first!r} and {second!r} both stepped {run.shown(held)} with the same gradients ({at(hit)}): each of these "
            "updates was applied twice",
            cause="both optimizers were given these parameters",
            fix="give each parameter to one optimizer",
            steps=telling(hit),
            parameters=run.named(held),
            evidence={"steps": len(hit)},
        )


def never_stepped(run: Evidence) -> Iterator[Finding]:
    """See optimizers that never step although their parameters get gradients and nobody else moves them."""
    if run.overflows:
        return  # a GradScaler that finds overflows keeps optimizers from stepping: skipped-update speaks of that
    stepped = {i for _, event in run.steps for i in event.graded}
    for name, optimizer in run.setup.optimizers.items():
        if name in run.steps_by_optimizer:
            continue
        indices = run.facts.recorder.steppers.indices_of(optimizer) - run.ignored
        reached = sorted(indices & run.filled)
        if not reached or not stepped.isdisjoint(indices) or not run.moved.isdisjoint(reached):
            continue
        passes = [(r, e) for r, e in run.backwards.values() if not indices.isdisjoint(e.filled)]
        steps = telling(record.step for record, _ in passes)
        if len(passes) < 2:
            continue
        yield Finding(
            rule="never-stepped",
            seen=f"{name!r} never stepped in {several(len(run.records), 'step')}, although {several(len(passes), 'backward')} "
            f"gave gradients to {run.shown(reached)}; nothing else moved them",
            cause="step() is never called on this optimizer, or its condition is never true (`i % k == k`), or the run is "
            "shorter than one accumulation cycle",
            fix=f"call {name!r}'s step(); if it steps less often than every {len(run.records)} steps, run more steps",
            steps=steps,
            parameters=run.named(reached),
            evidence={"steps": len(run.records), "backward_passes": len(passes)},
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
            seen=f"the GradScaler skipped {len(skipped)} of {due} updates ({at(skipped)}): each time it found NaN or Inf in "
            f"the gradients, and its scale fell to {run.records[-1].loss_scale:g}",
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
            "an incomplete last accumulation group: its micro-batches are left over, and leak into the update of the next "
            f"group (those of step {missed[0]} went into the update of step {later})"
        )
        fix = "also step when the last batch of an epoch is reached, and divide its group's losses by the group's size"
    else:
        cause = "step() is not reached in these steps, or its condition is wrong"
        fix = "check the condition under which step() is called, or pass the loop's real period as every="
    yield Finding(
        rule="skipped-update",
        seen=f"no optimizer stepped in {len(missed)} of the {len(due)} steps in which one is due (every={every}; {at(missed)})"
        + (f", {run.options.max_skipped} allowed" if run.options.max_skipped else ""),
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


def _previous_user(run: Evidence, record: StepRecord, event: OptimizerStep) -> str | None:
    """Return which optimizer had used this step's gradients, if all of them that are not 0 were used before."""
    used = {i for portion in _used_up(event) for i in portion}
    if event.closure or not used or run.norm_at(event, used) == 0.0:
        return None
    fresh = set(event.graded) - used
    if fresh and total([n for i, n in zip(event.graded, event.norms.values(), strict=True) if i in fresh]) > 0.0:
        previous = _latest_before(run, event, used)
        # part of them fresh: only another optimizer's use says something (a stale rest is missing-zero-grad's)
        return previous if previous != event.optimizer else None
    return _latest_before(run, event, used)


def _latest_before(run: Evidence, event: OptimizerStep, indices: set[int]) -> str | None:
    position = next(n for n, (_, other) in enumerate(run.steps) if other is event)
    for _, other in reversed(run.steps[:position]):
        if not indices.isdisjoint(other.graded):
            return other.optimizer
    return None
