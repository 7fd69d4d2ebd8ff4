"""Rules about what an update changes."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding, match_names
from tl_telemetry._events import BY_HAND, OptimizerStep
from tl_telemetry._evidence import Evidence, at, number, several, telling
from tl_telemetry._record import read, total

# From this share of unchanged elements on, an update in low precision counts as lost.
ROUNDED_AWAY = 0.9


def lr_zero(run: Evidence) -> Iterator[Finding]:
    """See optimizers whose learning rate is 0 in every update."""
    for name, steps in run.steps_by_optimizer.items():
        if len(steps) < 3 or any(lr != 0.0 for _, event in steps for lr in map(read, event.lrs)):
            continue
        hit = telling(record.step for record, _ in steps)
        scheduled = any(
            getattr(s, "optimizer", None) is run.setup.optimizers.get(name) for s in run.setup.schedulers.values()
        )
        yield Finding(
            rule="lr-zero",
            seen=f"the learning rate of {name!r} was 0 in all of its {several(len(steps), 'update')} ({at(hit)})",
            cause="the schedule gives 0: an integer division (`step // warmup`), a warmup counted in epochs but stepped in "
            "batches (or the reverse), or a base rate of 0"
            if scheduled
            else "the optimizer was built with lr=0, or the loop sets its rate to 0",
            fix="print the schedule's first values; a warmup from 0 must leave 0 after its first step",
            steps=hit,
            evidence={"updates": len(steps)},
        )


def update_rounds_away(run: Evidence) -> Iterator[Finding]:
    """See low-precision weights that are too coarse for their updates."""
    for name, steps in run.steps_by_optimizer.items():
        counts: dict[int, list[float]] = {}
        counted = []
        for record, event in steps:
            if event.unchanged is None or not _rates(event):
                continue
            counted.append(record.step)
            values = event.unchanged.values()
            for position, index in enumerate(event.low_precision):
                of_this = counts.setdefault(index, [0.0, 0.0])
                of_this[0] += values[2 * position]
                of_this[1] += values[2 * position + 1]
        counts = {i: c for i, c in counts.items() if i not in run.ignored}
        graded = sum(c[0] for c in counts.values())
        unchanged = sum(c[1] for c in counts.values())
        if len(counted) < 3 or not graded or unchanged < ROUNDED_AWAY * graded:
            continue
        worst = [i for i, c in counts.items() if c[0] and c[1] >= ROUNDED_AWAY * c[0]]
        dtypes = sorted({str(run.tensors.entries[i].tensor.dtype).removeprefix("torch.") for i in worst})
        yield Finding(
            rule="update-rounds-away",
            seen=f"{100 * unchanged / graded:.0f} % of the elements of {run.shown(worst)} that had a gradient did not change "
            f"when {name!r} stepped ({len(counted)} updates looked at, {at(counted)}): the updates round to nothing in "
            f"{' and '.join(dtypes)}",
            cause="weights in low precision cannot hold changes this small relative to their size (bfloat16 keeps 8 bits)",
            fix="keep the weights in float32 and compute in low precision under torch.autocast, or raise the learning rate",
            steps=telling(counted),
            parameters=run.named(worst),
            evidence={"elements": int(graded), "unchanged": int(unchanged)},
        )


def no_update(run: Evidence) -> Iterator[Finding]:
    """See optimizers that step with gradients and a learning rate, and change nothing."""
    for name, steps in run.steps_by_optimizer.items():
        able = [
            (record, event)
            for record, event in steps
            if event.updates is not None and _rates(event) and total(event.norms.values()) > 0.0
        ]
        still = [
            record.step for record, event in able if event.updates is not None and total(event.updates.values()) == 0.0
        ]
        # float16 and bfloat16 weights that do not move are update-rounds-away's
        if len(still) < 2 or len(still) < len(able) or any(event.low_precision for _, event in able):
            continue
        _record, event = able[-1]
        lr = max(_rates(event))
        norm = total(event.norms.values())
        yield Finding(
            rule="no-update",
            seen=f"{name!r} stepped {several(len(still), 'time')} and changed no parameter ({at(still)}), with a gradient norm "
            f"of {number(norm)} and a learning rate of {number(lr)}",
            cause="undecided: the step is too small for the weights' precision (a unit mistake in the learning rate), or this "
            "optimizer's step() does not apply what it computes",
            fix="compare the learning rate with one that trained before; for an optimizer of your own, check that it writes "
            "to the parameters in place",
            steps=telling(still),
            evidence={"updates": len(still), "grad_norm": norm, "lr": lr},
        )


def frozen_moved(run: Evidence) -> Iterator[Finding]:
    """See parameters that move although they are frozen, and whatever matches ``frozen=``."""
    hit: list[int] = []
    moved: dict[int, float] = {}
    for record, event in run.steps:
        if not event.frozen or event.updates is None:
            continue
        by_hand = {i for p in event.portions if p.source == (BY_HAND,) for i in p.parameters}
        for index, norm, update in zip(event.graded, event.norms.values(), event.updates.values(), strict=True):
            # a gradient that somebody put there on a parameter without autograd is how zeroth-order methods train
            if (
                index in event.frozen
                and update > 0.0
                and index not in run.ignored
                and not (index in by_hand and norm > 0.0)
            ):
                moved[index] = max(moved.get(index, 0.0), update)
                hit.append(record.step)
    if moved:
        yield Finding(
            rule="frozen-moved",
            seen=f"{run.shown(moved)} moved by up to {number(max(moved.values()))} a step although frozen "
            f"(requires_grad=False; {at(hit)})",
            cause="the optimizer still holds them and their .grad is not None: weight decay and momentum go on moving them",
            fix="set .grad to None when freezing (zero_grad(set_to_none=True)), or leave frozen parameters out of the optimizer",
            steps=telling(hit),
            parameters=run.named(moved),
            evidence={"largest_update": max(moved.values())},
        )
    yield from _asked_frozen(run)


def _asked_frozen(run: Evidence) -> Iterator[Finding]:
    if not run.options.frozen:
        return
    facts = run.facts
    names = sorted(facts.start.names() | facts.end.names())
    asked = set(match_names(names, run.options.frozen, argument="frozen"))
    moved = facts.end.moved_since(facts.start)
    for _, event in run.steps:
        if event.updates is not None:
            moved |= {run.tensors.name(i) for i, u in zip(event.graded, event.updates.values(), strict=True) if u > 0.0}
    broken = [name for name in names if name in asked & moved]
    if not broken:
        return
    parameters = {entry.name for entry in run.tensors.entries}
    buffers = [name for name in broken if name not in parameters]
    weights = [name for name in broken if name in parameters]
    causes = []
    if weights:
        causes.append("an optimizer (or the loop itself) changes these parameters")
    if buffers:
        causes.append(
            "these buffers are written in the forward pass, as BatchNorm in training mode does with its statistics"
        )
    yield Finding(
        rule="frozen-moved",
        seen=f"{_listed(broken)} changed during the run although frozen={list(run.options.frozen)} says that it must not",
        cause="; ".join(causes),
        fix="; ".join(
            (["leave them out of the optimizer and freeze them (requires_grad_(False))"] if weights else [])
            + (["put the frozen modules in eval mode (module.eval()) after each model.train()"] if buffers else [])
        ),
        parameters=tuple(broken),
        evidence={"changed": len(broken)},
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _rates(event: OptimizerStep) -> list[float]:
    """Return the learning rates that are not 0."""
    return [lr for lr in map(read, event.lrs) if lr != 0.0]
