"""Rules about the incomplete group at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from tl_accum._compare import Comparison
from tl_accum._context import Context
from tl_accum._plan import Group
from tl_accum._rules.timing import Steps, all_steps
from tl_accum._updates import passes
from tl_accum._vectors import norm, ratio
from tl_accum._words import number, optimizers, ordinal, several, times
from tl_core import Finding


def last_group(comparison: Comparison) -> Iterator[Finding]:
    """See what becomes of the micro-batches that are left over when an epoch ends."""
    group = next((g for g in comparison.plan.groups if g.incomplete), None)
    if group is None:
        return
    found = all_steps(comparison)
    idle = [s for s in found if s.wanted[group.number] and not s.made[group.number] and s.indices]
    if idle:
        carried = all(steps.is_stream for steps in idle)
        if carried and comparison.plan.implied:
            return  # a note says it: nobody asked for an epoch's end
        yield _unstepped(comparison, group, idle, carried=carried)
        return
    gaps = comparison.gaps[group.number].gradients
    if gaps and all(gap.agrees for gap in comparison.gaps[: group.number]):
        context = Context(comparison, group.number, gaps[0])
        if (found_scale := _scale(context)) is not None:
            yield found_scale


def _epoch(comparison: Comparison) -> str:
    plan = comparison.plan
    assert plan.epoch_length is not None
    rest = plan.epoch_length % plan.accumulation_steps
    return (
        f"the last {several(rest, 'micro-batch')} of an epoch of {plan.epoch_length} (groups of "
        f"{plan.accumulation_steps}, incomplete last group of {rest})"
    )


def _unstepped(comparison: Comparison, group: Group, idle: list[Steps], *, carried: bool) -> Finding:
    plan = comparison.plan
    names = [steps.optimizer for steps in idle]
    following = comparison.run.groups[group.number + 1]
    held = passes(comparison.run, following)
    left = norm(held[0].before) if held else 0.0
    seen = f"{_epoch(comparison)} led to no step of {optimizers(names)}"
    fix = (
        "step after the last micro-batch of an epoch too, and divide its losses by the size of its group: "
        f"`(i + 1) % k == 0 or i + 1 == {plan.epoch_length}`, "
        "where i counts the micro-batches of an epoch from 0"
    )
    after = f"after each {ordinal(plan.accumulation_steps)} micro-batch only"
    if not left:
        return Finding(
            "last-group-dropped",
            f"{seen}: their gradients were gone when the next epoch began",
            f"the step updates {after}, and something clears the gradients between the epochs: "
            f"{several(len(group.parts), 'micro-batch')} an epoch train nothing",
            fix,
            evidence={"left_over_norm": 0.0},
        )
    into = (
        "went into the next epoch's first update together with "
        + several(plan.accumulation_steps - len(group.parts), "micro-batch")
        + " of it"
        if carried
        else f"leaked into the next epoch's first update, on top of its own {plan.accumulation_steps} micro-batches"
    )
    return Finding(
        "last-group-leaks",
        f"{seen}: their gradients (norm {number(left)}) {into}",
        f"the step updates {after}, and the gradients that remain are neither applied nor cleared at the end of the "
        "epoch",
        fix,
        evidence={"left_over_norm": left},
    )


def _scale(context: Context) -> Finding | None:
    """See a last group whose gradients are a multiple of the full batch's."""
    plan = context.comparison.plan
    factor = ratio(context.got, context.expected, context.rtol)
    if factor is None or not context.is_kept:
        return None
    rest, k = context.num_parts, plan.accumulation_steps
    if not context.is_mean:
        return None  # no mean: what is due is told by the rules of every group
    divisor = rest / factor
    whole = ", the size of a complete group," if abs(divisor / k - 1.0) < context.rtol else ""
    by = f"divided by {number(divisor)}{whole} and not" if abs(divisor - 1.0) > context.rtol else "not divided"
    cause = f"its losses are {by} by the {rest} that there {'is' if rest == 1 else 'are'}"
    return Finding(
        "last-group-scale",
        f"the update of {_epoch(context.comparison)} uses gradients {times(factor)} the full batch's",
        cause,
        f"divide by the size of the group that the micro-batch belongs to: `min(k, {plan.epoch_length} - i // k * k)`, "
        "where i counts the micro-batches of an epoch from 0",
        parameters=tuple(gap.name for gap in context.gap.parameters),
        evidence={"ratio": factor},
    )
