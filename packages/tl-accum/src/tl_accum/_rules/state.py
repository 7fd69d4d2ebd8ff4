"""Rules about what else an update moves: schedulers, settings, weights, averages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tl_accum._compare import Comparison
from tl_accum._differences import GroupGap, moving_places, scheduler_steps
from tl_accum._rules.entries import entry
from tl_accum._vectors import is_measured, largest
from tl_accum._words import cycle, number, often, places, shown
from tl_core import Finding, parameter_names
from tl_telemetry import OptimizerStep, Piece, StateDifference


def state_findings(comparison: Comparison, *, told: bool) -> Iterator[Finding]:
    """See what differs beside the gradients.

    Args:
        comparison: both runs.
        told: whether a finding about updates or gradients explains that weights, and what follows them, differ.
    """
    found = list(_schedulers(comparison))
    if not (told or found):
        found += _settings(comparison)
    found += _state(comparison, told=told or bool(found))
    if not (told or found or comparison.is_random):
        found += _weights(comparison)
    yield from found


def _schedulers(comparison: Comparison) -> Iterator[Finding]:
    plan = comparison.plan
    for name in dict.fromkeys(name for gap in comparison.gaps for name in gap.schedulers):
        gap = next(gap for gap in comparison.gaps if name in gap.schedulers)
        wanted, made = (
            scheduler_steps(run.groups[gap.number]).get(name, []) for run in (comparison.reference, comparison.run)
        )
        due, count = (sum(n for _, n in found) for found in (wanted, made))
        parts = len(plan.groups[gap.number].parts)
        kind = type(comparison.run.setup.schedulers.get(name)).__name__
        if due and count == due * parts and len(made) == parts:
            by_metric = isinstance(comparison.run.setup.schedulers.get(name), ReduceLROnPlateau)
            what = "its patience runs out" if by_metric else "the schedule runs"
            cause = f"scheduler.step() is called in every micro-batch: {what} {parts} times too fast"
        elif not made:
            cause = "scheduler.step() is not reached in any of these micro-batches"
        elif count > due and any(place < parts - 1 for place, _ in made):
            cause = "scheduler.step() is called in micro-batches that make no update"
        elif count > due:
            cause = "scheduler.step() is called more often after an update than with full batches"
        else:
            cause = "scheduler.step() is called less often after an update than with full batches"
        stepped = f"stepped {often(count)}" if count else "did not step"
        where = f", in {places((place for place, _ in made), parts)}" if made else ""
        yield Finding(
            "scheduler-steps",
            f"scheduler {name!r} ({kind}) {stepped} in {cycle(plan, plan.groups[gap.number])}{where}; with the full "
            f"batch, it {f'stepped {often(due)}' if due else 'did not step'}",
            cause,
            "call scheduler.step() after optimizer.step(), in the same branch",
            evidence={"expected": due, "steps": count},
        )


def moved_between(comparison: Comparison) -> Iterator[Finding]:
    """See weights, and buffers that no forward pass moves, that move in micro-batches without an update."""
    run, plan = comparison.run, comparison.plan
    own = set(parameter_names(run.setup.model))
    for gap, group, made in zip(comparison.gaps, plan.groups, run.groups, strict=True):
        own_here = own | set(gap.buffers).difference(run.moved_in_forward)
        hit: dict[int, set[str]] = {}
        for place, step in enumerate(made.steps):
            names = {_name(change) for change in step.changed if _is_moved(change, _name(change) in own)} & own_here
            if names and not step.has(OptimizerStep):
                hit[place] = names
        if hit:
            moved = sorted(set().union(*hit.values()))
            yield Finding(
                "moved-per-micro-batch",
                f"{shown(moved, run)} changed in {places(hit, len(made.steps))} of {cycle(plan, group)}, in which no "
                "optimizer stepped",
                "the step changes the weights, or a buffer, itself (a decay by hand, a clamp, an update by hand) in "
                "micro-batches that make no update",
                "do it where the optimizer steps, in the same branch",
                parameters=tuple(moved),
                evidence={"micro_batches": tuple(hit)},
            )
            return


def _name(change: StateDifference) -> str:
    return ".".join(str(part) for part in change.path if part != "")


def _is_moved(change: StateDifference, is_parameter: bool) -> bool:
    """Tell whether a weight, or a buffer of more than one element (no counter), moved by more than rounding."""
    if change.piece != Piece("weights") or change.tensor is None:
        return False
    if not is_parameter and change.tensor.num_elements < 2:
        return False
    before, after = change.tensor_a(), change.tensor_b()
    if before is None or after is None or not is_measured(before):
        return True
    limit = 16 * torch.finfo(before.dtype).eps * largest({"": before})
    return largest({"": after - before}) > limit


def _settings(comparison: Comparison) -> Iterator[Finding]:
    gap = next((gap for gap in comparison.gaps if gap.settings), None)
    if gap is None:
        return
    plan, run = comparison.plan, comparison.run
    first = gap.settings[0]
    setting = "".join(f"[{key!r}]" if isinstance(key, str) else f" group {key}" for key in first.path)
    moving = [
        place
        for place, one in enumerate(run.groups[gap.number].steps)
        if any(change.piece == first.piece and change.path == first.path for change in one.changed)
    ]
    last = len(run.groups[gap.number].steps) - 1
    times_k = first.plain_b == first.plain_a * plan.accumulation_steps if _numbers(first) else False
    if times_k and not _moves_again(comparison, first, gap.number):
        cause = (
            f"it is multiplied by the {plan.accumulation_steps} accumulation steps, although the full batch is the same"
        )
        fix = "use the settings that the full batch is trained with"
    elif len(moving) <= 1 and gap.number == 0 and not _moves_again(comparison, first, 0):
        cause = "it is set once, to another value for other accumulation steps"
        fix = "use the settings that the full batch is trained with"
    elif any(place != last for place in moving):
        cause = f"it is set by hand in {places(moving, last + 1)}: a schedule that counts micro-batches, not updates"
        fix = "compute it from the number of updates (setup.step_index // k), and set it once an update"
    elif (plateau := _plateau(comparison)) is not None:
        cause = (
            f"scheduler {plateau!r} sets it by a metric, and was given another one: the last micro-batch's loss "
            "instead of the whole group's"
        )
        fix = "give it the mean of the group's losses, or a validation loss"
    else:
        cause = (
            "undecided: it is computed from the step's index, from a counter that counts micro-batches, or from the "
            "accumulation steps"
        )
        fix = "compute it from the number of updates (setup.step_index // k)"
    yield Finding(
        "settings-differ",
        f"optimizer {first.piece.name!r}{setting} is {first.shown_b} after {cycle(plan, plan.groups[gap.number])}, and "
        f"{first.shown_a} with full batches"
        + (f"; {len(gap.settings) - 1} more settings differ" if len(gap.settings) > 1 else ""),
        cause,
        fix,
        evidence={"expected": first.plain_a, "got": first.plain_b},
    )


def _plateau(comparison: Comparison) -> str | None:
    """Return the name of a scheduler that goes by a metric."""
    schedulers = comparison.run.setup.schedulers.items()
    return next((name for name, scheduler in schedulers if isinstance(scheduler, ReduceLROnPlateau)), None)


def _numbers(difference: StateDifference) -> bool:
    return all(isinstance(value, (int, float)) for value in (difference.plain_a, difference.plain_b))


def _moves_again(comparison: Comparison, difference: StateDifference, group: int) -> bool:
    """Tell whether a setting changes in later groups too."""
    steps = [step for later in comparison.run.groups[group + 1 :] for step in later.steps]
    return any(c.piece == difference.piece and c.path == difference.path for step in steps for c in step.changed)


def _state(comparison: Comparison, *, told: bool) -> Iterator[Finding]:
    plan = comparison.plan
    for piece in dict.fromkeys(piece for gap in comparison.gaps for piece, _ in gap.state):
        gap = next(gap for gap in comparison.gaps if any(p == piece for p, _ in gap.state))
        wanted, made = (moving_places(run.groups[gap.number], piece) for run in (comparison.reference, comparison.run))
        held = [one for p, one in gap.state if p == piece]
        last = len(plan.groups[gap.number].parts) - 1
        if told and made and set(made) <= {last}:
            continue  # it follows the weights, or the gradients
        parts = len(plan.groups[gap.number].parts)
        name = entry(comparison, piece)
        fix = "update it once an update, in the branch where the optimizer steps"
        if made:
            seen = f"{name} moved in {places(made, parts)} of {cycle(plan, plan.groups[gap.number])}"
            if len(made) == parts:
                cause = "it is updated in every micro-batch instead of after each update"
            elif made == [last]:
                cause = (
                    "undecided: its update uses another factor (a decay that depends on the step's index, which counts "
                    "micro-batches, or on the accumulation steps)"
                )
                fix = "compute what its update uses from the number of updates"
            else:
                cause = "it is updated in micro-batches that make no update"
        else:
            seen = f"{name} did not move in {cycle(plan, plan.groups[gap.number])}"
            cause = "it is not updated with accumulation"
        worst = held[0]
        inner = worst.name.lstrip(".")  # the root module has no name of its own
        due = f"with the full batch, it {f'moved {often(len(wanted))}' if wanted else 'did not move'}"
        amount = f"{number(worst.got)} instead of {number(worst.expected)}"
        yield Finding(
            "state-per-micro-batch",
            f"{seen}; {due}" + (f"; {inner} moved by {amount}" if inner else f"; by {amount}"),
            cause,
            fix,
            evidence={"micro_batches": tuple(made), "state": str(piece)},
        )


def _weights(comparison: Comparison) -> Iterator[Finding]:
    """See weights that move otherwise although the gradients agree."""
    gap: GroupGap | None = next((gap for gap in comparison.gaps if gap.weights), None)
    if gap is None or gap.settings or gap.gradients or gap.timing:
        return
    worst = gap.weights[0]
    names = tuple(one.name for one in gap.weights)
    yield Finding(
        "weights-differ",
        f"{shown(names, comparison.run)} moved otherwise in "
        f"{cycle(comparison.plan, comparison.plan.groups[gap.number])} "
        f"than with the full batch, although the applied gradients agree: {worst.name} by {number(worst.got)} instead "
        f"of {number(worst.expected)}",
        "undecided: something beside the optimizers changes the weights, or what an optimizer does depends on more "
        "than gradients and settings",
        "look at what the step does to the weights for make_step(1) and for more",
        parameters=names,
        evidence={"expected": worst.expected, "got": worst.got},
    )
