"""Rules about what a setup keeps beside the model: averages of the weights, and other state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from tl_core import Finding
from tl_telemetry._evidence import Evidence, number, several
from tl_telemetry._fingerprints import StateEntry
from tl_telemetry._forward import RAN_WITH_GRAD, RAN_WITHOUT_GRAD

# An average that moves by less than this part of how far the weights moved does not follow them. With a decay of
# 0.99999 it is 1e-4 after 20 updates; the rounding of an average of itself is below 1e-6.
FOLLOWS = 1e-5
# Below this relative change of the weights, a slow average rounds away in float32 by rights.
MOVED_ENOUGH = 5e-3

_IDLE = "does not write in place (`e = e.lerp(...)` for `e.lerp_(...)`), or finds none of its names (a prefix)"


def ema_never_updated(run: Evidence) -> Iterator[Finding]:
    """See averages of the weights that do not follow them, or that are the weights themselves."""
    updates = len(run.steps)
    if updates < 3:
        return
    for name, before in run.facts.state_start.items():
        after = run.facts.state_end.get(name)
        if not before.averages or after is None:
            continue
        entry = f"{name} ({type(after.value).__name__})"
        if before.aliases and after.aliases:
            yield Finding(
                rule="ema-never-updated",
                seen=f"{entry} shares the memory of all of the model's weights: it is the model, and no average of it",
                cause="it holds the parameters themselves (`p.data`, `p.detach()`) instead of copies: every update of "
                "the weights is at once its own",
                fix="copy the weights when the average is made: p.detach().clone(), or copy.deepcopy(model)",
                evidence={"updates": updates},
            )
        elif before.copies and _unchanged(before, after):
            used = ", although forward passes" if _is_used(run, after.value) else "; no forward pass"
            yield Finding(
                rule="ema-never-updated",
                seen=f"{entry} started as a copy of the weights and never changed in "
                f"{several(updates, 'update')}{used} used it",
                cause=f"nothing wrote to it, and it stays at the initial weights: its update is not called, {_IDLE}",
                fix="call its update after each optimizer.step(), and let it write in place; if it is due less often "
                f"than in every {updates} updates, run more steps",
                evidence={"updates": updates},
            )
        elif before.copies and (moved := _left_behind(before, after)):
            dtypes = sorted({str(after.samples[key].dtype).removeprefix("torch.") for key in before.copies.values()})
            yield Finding(
                rule="ema-never-updated",
                seen=f"{entry} started as a copy of the weights and did not follow them in "
                f"{several(updates, 'update')}, although it was written to: the weights moved by {number(moved)} of "
                f"their size, the average by less than {FOLLOWS:g} of that in their direction",
                cause="undecided: its update is given the average itself (or the initial weights) instead of the "
                f"trained model, its decay is 1, or its updates round away in {' and '.join(dtypes)}",
                fix="pass the trained model to its update; keep the average in float32",
                evidence={"updates": updates, "relative_change": moved},
            )


def static_state(run: Evidence) -> Iterator[Finding]:
    """Note other entries of ``setup.state`` that never change and that no forward pass used."""
    updates = len(run.steps)
    if updates < 2:
        return
    for name, before in run.facts.state_start.items():
        after = run.facts.state_end.get(name)
        if after is None or not before.in_state:
            continue
        if before.averages and before.copies and updates >= 3 and (counted := _only_counts(before, after)):
            yield _counting(run, f"{name} ({type(after.value).__name__})", counted, _distance(before, after))
        if not _unchanged(before, after) or _is_used(run, after.value):
            continue
        if before.averages and (before.copies or before.aliases) and updates >= 3:
            continue
        yield Finding(
            rule="static-state",
            seen=f"{name} ({type(after.value).__name__}) never changed in "
            f"{several(updates, 'update')}, and no forward pass used it",
            cause="undecided: it is constant, or changes later (a best score, an average of the last epochs), "
            "or its update is never called",
            fix="nothing, if it is meant to stay",
            evidence={"updates": updates},
        )


def _only_counts(before: StateEntry, after: StateEntry) -> str:
    """Say how a number in an average changed, if none of its copies was written to; else nothing."""
    written = after.tensors.moved_since(before.tensors) | after.tensors.touched_since(before.tensors)
    if len(before.numbers) != len(after.numbers) or not set(before.copies.values()) <= after.tensors.names() - written:
        return ""
    pairs = zip(before.numbers, after.numbers, strict=True)
    numbers = ((a, b) for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float)))
    return next((f"from {a:g} to {b:g}" for a, b in numbers if b > a), "")


def _counting(run: Evidence, entry: str, counted: str, moved: float) -> Finding:
    updates = len(run.steps)
    return Finding(
        rule="static-state",
        seen=f"{entry} started as a copy of the weights and "
        f"only counts: in {several(updates, 'update')} a number of it went {counted} and nothing wrote to its copy, "
        f"while the weights moved by {number(moved)} of their size",
        cause=f"undecided: it begins later (a warmup, every n-th update), {_IDLE}",
        fix="nothing, if it begins later; else look at what its update writes to",
        evidence={"updates": updates, "relative_change": moved},
    )


def _distance(before: StateEntry, after: StateEntry) -> float:
    """Return how far the weights moved, relative to their size, as far as their samples tell."""
    pairs = [(start, after.weights[name]) for name, start in before.weights.items() if name in after.weights]
    pairs = [(start.double().cpu(), end.double().cpu()) for start, end in pairs if start.shape == end.shape]
    size = sum(float(start.square().sum()) for start, _ in pairs)
    return math.sqrt(sum(float((end - start).square().sum()) for start, end in pairs) / size) if size else 0.0


def _unchanged(before: StateEntry, after: StateEntry) -> bool:
    """Tell whether nothing of an entry changed, and nobody wrote to it: not even a counter moved."""
    names = before.tensors.names()
    return (
        bool(names or before.numbers)
        and before.numbers == after.numbers
        and names == after.tensors.names()
        and not after.tensors.moved_since(before.tensors)
        and not after.tensors.touched_since(before.tensors)
    )


def _left_behind(before: StateEntry, after: StateEntry) -> float:
    """Return how far the weights moved, relative to their size, if the average was written to and stayed; else 0."""
    keys = before.copies.values()
    written = after.tensors.moved_since(before.tensors) | after.tensors.touched_since(before.tensors)
    if written.isdisjoint(keys) or not set(keys) <= set(after.samples):
        return 0.0  # only a counter moves so far
    # Inner products of the start, of the average's way and of the weights' way from there. What lies along the start is
    # left out: an average of itself may shrink (`e.mul_(d).add_(e, alpha=1 - d)` multiplies by d twice).
    size = start_own = start_way = own_way = way_way = 0.0
    for weight, key in before.copies.items():
        samples = (before.samples[key], after.samples[key], after.weights.get(weight))
        if any(sample is None or sample.shape != samples[0].shape for sample in samples):
            return 0.0
        start, end, goal = (sample.double().cpu() for sample in samples if sample is not None)
        own, way = end - start, goal - start
        size += float(torch.dot(start, start))
        start_own += float(torch.dot(start, own))
        start_way += float(torch.dot(start, way))
        own_way += float(torch.dot(own, way))
        way_way += float(torch.dot(way, way))
    if not size:
        return 0.0
    along, distance = own_way - start_own * start_way / size, way_way - start_way**2 / size
    moved = math.sqrt(max(distance, 0.0) / size)
    return moved if moved > MOVED_ENOUGH and abs(along) < FOLLOWS * distance else 0.0


def _is_used(run: Evidence, value: object) -> bool:
    """Tell whether a forward pass ran through a module of an entry."""
    flags = run.facts.recorder.forward.flags
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return any(flags.get(id(module), 0) & (RAN_WITH_GRAD | RAN_WITHOUT_GRAD) for module in modules)
