"""What is worth knowing and may be meant, and what could not be judged."""

from __future__ import annotations

from collections.abc import Iterator

from tl_accum._compare import Comparison
from tl_accum._rules.timing import all_steps
from tl_accum._updates import changes, updates
from tl_accum._vectors import is_finite, largest, norm, ratio
from tl_accum._words import cycle, number, places, several, times
from tl_core import Finding, parameter_names
from tl_telemetry import Clip


def notes(comparison: Comparison, *, told: bool) -> Iterator[Finding]:
    """Say what is worth knowing.

    Args:
        comparison: both runs.
        told: whether there are findings.
    """
    if not told:
        yield from _clip_without_effect(comparison)
        yield from _edit_without_effect(comparison)
        yield from _hidden_scale(comparison)
    yield from _carried_over(comparison)
    yield from _per_forward(comparison)
    yield from _precision(comparison)
    yield from _noise(comparison)
    yield from _not_judged(comparison, told=told)


def _clip_without_effect(comparison: Comparison) -> Iterator[Finding]:
    for group, made in zip(comparison.plan.groups, comparison.run.groups, strict=True):
        last = len(made.steps) - 1
        found = [
            (place, event)
            for place, step in enumerate(made.steps[:last])
            for event in step.record.events
            if isinstance(event, Clip) and event.bound < 1e6
        ]
        if found:
            clip = found[0][1]
            yield Finding(
                "clip-without-effect",
                f"{clip.function}() at {clip.site} runs in {places((p for p, _ in found), last + 1)} of "
                f"{cycle(comparison.plan, group)}, where it changed nothing yet: its bound of {clip.bound:g} was not "
                "reached",
                "",
                "clip once, between the last backward() of a group and optimizer.step()",
            )
            return


def _edit_without_effect(comparison: Comparison) -> Iterator[Finding]:
    run = comparison.run
    names = parameter_names(run.setup.model)
    for group, made in zip(comparison.plan.groups, run.groups, strict=True):
        found = [change for change in changes(run, made, names, len(made.steps) - 1) if change.what == "edit"]
        found = [change for change in found if norm(change.after)]  # cleared on purpose, where the gradients agree
        if found:
            below = (
                "; what they make of the update is below the loop's own noise"
                if comparison.noise
                else ", and the gradients of the update agree all the same"
            )
            yield Finding(
                "edit-without-effect",
                f"the gradients were changed after {places((c.place for c in found), len(made.steps))} of "
                f"{cycle(comparison.plan, group)}, before all of them were added up{below}",
                "",
                "nothing, if an earlier state of them is put back; else change gradients (divide, clip, add noise) "
                "once, between the last backward() of a group and optimizer.step()",
            )
            return


def _hidden_scale(comparison: Comparison) -> Iterator[Finding]:
    """See gradients that are a multiple after the last backward pass, and of one length when they are applied."""
    rows = []
    for full, parts in zip(comparison.reference.groups, comparison.run.groups, strict=True):
        wanted, made = updates(comparison.reference, full), updates(comparison.run, parts)
        rows += [(a, b) for name in wanted for a, b in zip(wanted[name], made.get(name, ()), strict=False)]
    if len(rows) < 2 or any(a.clips or b.clips for a, b in rows):
        return
    factors = [ratio(b.raw, a.raw, comparison.bounds.length(a.raw)) for a, b in rows]
    lengths = [norm(b.applied) for _, b in rows]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or min(abs(factor - 1.0) for factor in known) < 0.01:
        return
    if max(lengths) - min(lengths) > 1e-3 * max(lengths) or not max(lengths):
        return
    yield Finding(
        "hidden-scale",
        f"the accumulated gradients are {times(known[0])} the full batch's after the last backward(), and agree as "
        f"applied, with a norm of {number(lengths[0])} in every update",
        "undecided: what runs in between makes up for the scale (a division by hand), or hides it (a clip by hand, "
        "the gradients' signs)",
        "nothing, if the gradients are divided by hand; else call backward() on loss / k",
    )


def _carried_over(comparison: Comparison) -> Iterator[Finding]:
    plan = comparison.plan
    group = next((g for g in plan.groups if g.incomplete), None)
    if group is None or not plan.implied:
        return
    found = [s for s in all_steps(comparison) if s.wanted[group.number] and not s.made[group.number]]
    if found and all(steps.is_stream for steps in found):
        yield Finding(
            "carried-over",
            f"the loader has {plan.epoch_length} batches: the last {several(len(group.parts), 'micro-batch')} of an "
            f"epoch went into the next epoch's first update, which comes after every {plan.accumulation_steps} "
            "micro-batches whatever their epoch",
            "",
            f"nothing, if that is meant; pass epoch_length={plan.epoch_length} to demand an update at an epoch's end",
        )


def _per_forward(comparison: Comparison) -> Iterator[Finding]:
    if comparison.agrees and (names := comparison.run.moved_in_forward):
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield Finding(
            "buffers-per-forward",
            f"{shown} moved in every forward pass, so once a micro-batch; gradients and weights agree all the same",
            "",
            "nothing, if these statistics may move faster with accumulation; else scale their momentum",
        )


def _precision(comparison: Comparison) -> Iterator[Finding]:
    low = comparison.bounds.low
    if low is not None or comparison.bounds.tf32:
        name = "TF32 (float32 on this GPU)" if low is None else str(low).removeprefix("torch.")
        yield Finding(
            "low-precision",
            f"the loop computes in {name}: gradients were compared to {comparison.bounds.relative:.2g} of each "
            "parameter's largest",
            "",
            "check it in float32 too, where smaller differences show",
        )


def _noise(comparison: Comparison) -> Iterator[Finding]:
    if not comparison.noise or comparison.too_noisy:
        return
    counted = (
        "all that was judged is when optimizers and schedulers step, what is lost or left over between micro-batches, "
        "and the scale of the gradients"
        if comparison.is_random
        else "only larger differences were counted"
    )
    yield Finding(
        "noise",
        f"the loop differs from itself when it is repeated, by up to {number(comparison.noise)} of its largest "
        f"gradient{_why(comparison)}: {counted}",
        "",
        "draw no random numbers in the step, or the same for a batch as for its micro-batches",
    )


def _why(comparison: Comparison) -> str:
    return ", since the step draws random numbers" if comparison.drew else ""


def _not_judged(comparison: Comparison, *, told: bool) -> Iterator[Finding]:
    if comparison.too_noisy:
        yield Finding(
            "not-judged",
            f"the loop differs from itself when it is repeated, by up to {number(comparison.noise)} of its largest "
            f"gradient{_why(comparison)}: gradients and weights could not be compared",
            "",
            "draw no random numbers in the step, or the same for a batch as for its micro-batches",
        )
    if told:
        return
    made = [
        update
        for group in comparison.reference.groups
        for found in updates(comparison.reference, group).values()
        for update in found
    ]
    if comparison.moved_by_hand:
        yield Finding(
            "not-judged",
            "no optimizer of the setup stepped, and the weights moved all the same: only what optimizers update can be "
            "compared",
            "",
            "put the optimizer that makes the updates into the setup, or write them as an optimizer's step()",
        )
    elif not made:
        yield Finding(  # without a scaler, that is a finding
            "not-judged",
            "the GradScaler skipped every step, of full batches too: at its loss scale, the gradients hold Inf or NaN",
            "",
            "start it with a smaller init_scale, or pass more cycles, so that it gets there by itself",
        )
    elif not all(is_finite(update.applied) for update in made):
        yield Finding(
            "not-judged",
            "the full batch's gradients are not finite: they could not be compared",
            "",
            "run the loop under tl_telemetry's run_training(...).assert_finite() to see where they come from",
        )
    elif not any(largest(update.accumulated) for update in made):
        yield Finding(
            "not-judged",
            "the full batch's gradients are all 0: they could not be compared",
            "",
            "give the check batches whose loss depends on the weights",
        )
