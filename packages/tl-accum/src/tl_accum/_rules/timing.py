"""Rules about when optimizers step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tl_accum._compare import Comparison
from tl_accum._runs import GroupRun
from tl_accum._updates import updates
from tl_accum._words import cycle, number, optimizers, ordinal, places, several
from tl_core import Finding
from tl_telemetry import SkippedStep


@dataclass
class Steps:
    """When one optimizer stepped.

    Attributes:
        comparison: both runs.
        optimizer: its name.
    """

    comparison: Comparison
    optimizer: str

    @cached_property
    def wanted(self) -> list[int]:
        """How often it stepped with each full batch."""
        run = self.comparison.reference
        return [len(updates(run, group).get(self.optimizer, ())) for group in run.groups]

    @cached_property
    def made(self) -> list[list[int]]:
        """Of each group, the micro-batches in which it stepped."""
        run = self.comparison.run
        return [[u.place for u in updates(run, group).get(self.optimizer, ())] for group in run.groups]

    @cached_property
    def indices(self) -> list[int]:
        """The step indices at which it stepped."""
        groups = self.comparison.plan.groups
        return [g.first + place for g, made in zip(groups, self.made, strict=True) for place in made]

    @property
    def period(self) -> int | None:
        """How many micro-batches lie between its steps, where that is always the same; None else."""
        distances = {b - a for a, b in zip(self.indices, self.indices[1:], strict=False)}
        return distances.pop() if len(distances) == 1 else None

    @property
    def is_stream(self) -> bool:
        """Whether it steps after every ``k`` micro-batches, whatever epoch they belong to."""
        k = self.comparison.plan.accumulation_steps
        return bool(self.indices) and all((index + 1) % k == 0 for index in self.indices)


def all_steps(comparison: Comparison) -> list[Steps]:
    """Return when each optimizer stepped."""
    names = dict.fromkeys(
        name for run in (comparison.reference, comparison.run) for group in run.groups for name in updates(run, group)
    )
    return [Steps(comparison, name) for name in dict.fromkeys([*comparison.run.setup.optimizers, *names])]


def check_reference(comparison: Comparison) -> None:
    """Raise the error of a ``make_step`` whose step for one accumulation step makes no updates.

    Raises:
        ValueError: there is nothing to compare with.
    """
    found = all_steps(comparison)
    made = sum(len(steps.indices) for steps in found)
    if made and not any(any(steps.wanted) for steps in found):
        k = comparison.plan.accumulation_steps
        calls = several(len(comparison.reference.groups), "call")
        raise ValueError(
            f"make_step(1) must return a step that updates in every call: it made no update in {calls}, while "
            f"make_step({k})'s made {made} in {sum(len(g.parts) for g in comparison.plan.groups)}. make_step ignores "
            "its argument, or reads the accumulation steps from somewhere else"
        )


def timing_findings(comparison: Comparison) -> Iterator[Finding]:
    """See updates that come too early, too often, or not at all."""
    found = all_steps(comparison)
    if not any(any(steps.wanted) or steps.indices for steps in found):
        # a note says it where a scaler skipped them all
        if not any(skips(group) for group in comparison.reference.groups):
            yield _never(comparison, [steps.optimizer for steps in found], both=True)
        return
    overflown = {steps.optimizer: first for steps in found if (first := _overflown(steps)) is not None}
    idle = [steps.optimizer for steps in found if any(steps.wanted) and not steps.indices]
    if overflown:
        yield _skips(comparison, overflown)
    if set(idle) - overflown.keys():
        yield _never(comparison, [name for name in idle if name not in overflown], both=False)
    told: dict[tuple[str, ...], list[str]] = {}
    for steps in found:
        if steps.optimizer not in (*idle, *overflown) and (text := _timing(steps)) is not None:
            told.setdefault(text, []).append(steps.optimizer)
    for (rule, seen, cause, fix), names in told.items():
        yield Finding(rule, f"{optimizers(names)} {seen}", cause, fix, evidence={"optimizers": tuple(names)})


def skips(group: GroupRun, optimizer: str | None = None) -> int:
    """Return how many steps of a group a GradScaler skipped, of one optimizer or of all."""
    events = (event for step in group.steps for event in step.record.events)
    return sum(isinstance(event, SkippedStep) and optimizer in (None, event.optimizer) for event in events)


def _overflown(steps: Steps) -> int | None:
    """Return the first group whose only step a GradScaler skipped, where the full batch's ran."""
    run = steps.comparison.run
    for place, (wanted, made) in enumerate(zip(steps.wanted, steps.made, strict=True)):
        if wanted and not made and skips(run.groups[place], steps.optimizer):
            return place
    return None


def _skips(comparison: Comparison, found: dict[str, int]) -> Finding:
    plan = comparison.plan
    first = min(found.values())
    scale = comparison.run.groups[first].steps[-1].scale
    names = [name for name, group in found.items() if group == first]
    return Finding(
        "missing-update",
        f"the GradScaler skipped the step of {optimizers(names)} in {cycle(plan, plan.groups[first])}, and not with "
        f"the full batch: at a loss scale of {number(scale)}, the accumulated gradients hold Inf or NaN, and the full "
        "batch's do not",
        "undecided: the accumulated gradients are larger than the full batch's (a loss that is not divided by the "
        "accumulation steps), or those of one micro-batch overflow",
        "divide the loss by k before it is scaled; a smaller init_scale in the check lets the gradients be compared",
        evidence={"optimizers": tuple(names), "scale": scale},
    )


def _never(comparison: Comparison, names: list[str], *, both: bool) -> Finding:
    k = comparison.plan.accumulation_steps
    parts = sum(len(group.parts) for group in comparison.plan.groups)
    full = several(len(comparison.plan.groups), "full batch")
    if both:
        seen = (
            f"no optimizer stepped: not in {full} with make_step(1), nor in {parts} micro-batches with make_step({k})"
        )
        cause = "the condition under which it steps was true in none of these calls"
    else:
        seen = (
            f"{optimizers(names)} never stepped in {parts} micro-batches with make_step({k}), but did in {full} with "
            "make_step(1)"
        )
        cause = (
            f"the condition under which it steps was true in none of these {parts} calls: a counter that never gets "
            f"to {k} (it starts anew in each call), or one that counts to more than {parts}"
        )
    return Finding(
        "never-updates",
        seen,
        cause,
        f"update after each {ordinal(k)} micro-batch: `if (setup.step_index + 1) % k == 0`",
        evidence={"micro_batches": parts},
    )


def _timing(steps: Steps) -> tuple[str, str, str, str] | None:
    """Return (rule, seen, cause, fix) for one optimizer whose steps are not one for one at the end of a group."""
    plan = steps.comparison.plan
    k = plan.accumulation_steps
    groups = [g for g in plan.groups if not g.incomplete]
    rows = [(g, steps.wanted[g.number], steps.made[g.number]) for g in groups]
    # what follows an epoch whose last group was carried over is told by a rule of its own
    if any(g.incomplete for g in plan.groups) and steps.is_stream:
        return None
    condition = "look at the condition: `(setup.step_index + 1) % k == 0` is true after the last micro-batch of a group"
    early = [(g, made) for g, _, made in rows if any(place < k - 1 for place in made)]
    if early:
        group, made = early[0]
        total = sum(steps.wanted)
        counted = f"{several(len(steps.indices), 'update')} where {total} {'is' if total == 1 else 'are'} due"
        if all(made == list(range(k)) for _, _, made in rows):
            return (
                "premature-update",
                f"stepped in every micro-batch: {counted} (make_step({k}))",
                "it steps in each call of step(): under no condition, or one that does not count micro-batches, or "
                "not with k",
                f"{condition}, with the k that make_step was given",
            )
        only = {tuple(made) for _, _, made in rows}
        if len(only) == 1 and len(made) == 1:
            first = f"after micro-batch {made[0] + 1} of {k}, in each of {several(len(rows), 'cycle')}"
            return (
                "premature-update",
                f"stepped before the last micro-batch: {first}",
                f"the condition is off by {k - 1 - made[0]}: an update joins the first "
                f"{several(made[0] + 1, 'micro-batch').removeprefix('1 ')} of a group with what the group before it "
                "left (the first update has nothing of the latter)",
                f"{condition}, `setup.step_index % k == 0` after the first",
            )
        steady = steps.period is not None and steps.indices[0] + 1 == steps.period
        every = f", one in every {steps.period} micro-batches" if steady else ""
        before = [made for g, _, made in rows if g.number < group.number]
        if before and all(made == [k - 1] for made in before) and made == list(range(k)):
            return (
                "premature-update",
                f"stepped in every micro-batch of {cycle(plan, group)} ({counted}), and after the last one before",
                "its condition stays true once it was: a counter that an update does not set back to 0 (`seen >= k`)",
                "set the counter back after optimizer.step(), or test its remainder: `seen % k == 0`",
            )
        return (
            "premature-update",
            f"stepped before the last micro-batch of {cycle(plan, group)}: in {places(made, k)} ({counted}{every})",
            f"its condition counts to {steps.period} instead of {k}"
            if steady
            else "its condition does not count the micro-batches of a group",
            f"{condition}, with the k that make_step was given",
        )
    late = [g for g, wanted, made in rows if wanted and not made]
    if late:
        period = steps.indices[0] + 1
        every = f"; it stepped after {period} micro-batches instead" if period > k else ""
        return (
            "missing-update",
            f"made no update in {cycle(plan, late[0])}, but one with the full batch{every}",
            f"its condition counts to {period} instead of {k}"
            if period > k and not period % k
            else "undecided: its condition counts something else than micro-batches, or another condition keeps it "
            "from stepping",
            f"{condition}, with the k that make_step was given",
        )
    more = [(g, wanted, made) for g, wanted, made in rows if len(made) != wanted]
    if more:
        group, wanted, made = more[0]
        counted = f"made {several(len(made), 'update')} in {cycle(plan, group)}, and {wanted} with the full batch"
        if len(made) > wanted:
            return (
                "extra-update",
                counted,
                f"it steps {len(made)} times after the last micro-batch: two conditions are true there (the end of a "
                "group and the end of an epoch), or one call of step() is left over",
                "step once after the last micro-batch of a group, also where an epoch ends with it: "
                "`if end_of_group or end_of_epoch`",
            )
        return (
            "missing-update",
            counted,
            "it steps less often after a group than after a full batch: a loop or a condition around one of its steps "
            "depends on the accumulation steps",
            "step as often after the last micro-batch of a group as after a full batch",
        )
    return None
