"""What each update of a group applied, and what its gradients were made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tl_accum._runs import GroupRun, MicroStep, Run
from tl_accum._vectors import Vector, added, minus, norm
from tl_telemetry import Backward, Clip, GradientAct, OptimizerStep


@dataclass
class Update:
    """One step of an optimizer; within a group, one that had something to apply.

    Attributes:
        optimizer: its name.
        place: the micro-batch of the group in which it ran, from 0.
        raw: its gradients when the last backward pass before it ended, unscaled.
        accumulated: its gradients before any clipping that followed that pass, unscaled.
        clipped: its gradients after the last of those clips, unscaled; None without one.
        applied: its gradients when it ran, unscaled.
        clips: the clips between that pass and the step.
    """

    optimizer: str
    place: int
    raw: Vector
    accumulated: Vector
    clipped: Vector | None
    applied: Vector
    clips: tuple[Clip, ...]


def updates(run: Run, group: GroupRun) -> dict[str, list[Update]]:
    """Return the updates of a group by optimizer, in order; one that made none is missing."""
    found: dict[str, list[Update]] = {}
    acts = [(place, step.scale, act) for place, step in enumerate(group.steps) for act in step.acts]
    for position, (place, _, act) in enumerate(acts):
        event = act.event
        if not isinstance(event, OptimizerStep) or not event.applied:
            continue
        if place < len(group.steps) - 1 and not (event.graded or event.closure or _moved(group.steps[place])):
            continue  # step() was called with nothing to apply, and nothing was due
        graded = set(event.graded)
        scale = 1.0 if event.scale is None else event.scale.value()
        applied = _vector(run, act.before, graded, scale)
        raw: Vector = applied
        clips: list[GradientAct] = []
        for _, scale_then, earlier in reversed(acts[:position]):
            if isinstance(earlier.event, Clip) and not graded.isdisjoint(earlier.event.graded):
                clips.insert(0, earlier)
            elif isinstance(earlier.event, Backward) and not graded.isdisjoint(earlier.event.filled):
                raw = _vector(run, earlier.after, graded, scale_then)
                break
        accumulated, clipped = applied, None
        kept = tuple(clip.event for clip in clips if isinstance(clip.event, Clip))
        if kept:
            accumulated = _vector(run, clips[0].before, graded, _scale_at(kept[0]))
            clipped = _vector(run, clips[-1].after, graded, _scale_at(kept[-1]))
        update = Update(event.optimizer, place, raw, accumulated, clipped, applied, kept)
        found.setdefault(event.optimizer, []).append(update)
    return found


def _scale_at(clip: Clip) -> float:
    return 1.0 if clip.scale is None else clip.scale.value()


def _moved(step: MicroStep) -> bool:
    return any(change.piece.kind == "weights" for change in step.changed)


@dataclass
class Pass:
    """One backward pass of a group.

    Attributes:
        place: the micro-batch in which it ran, from 0.
        ordinal: which pass of that micro-batch, from 0.
        site: the line that called it.
        added: what it added to the gradients, unscaled.
        before: what was there before, unscaled.
        after: what was there afterwards, unscaled.
    """

    place: int
    ordinal: int
    site: str
    added: Vector
    before: Vector
    after: Vector


def passes(run: Run, group: GroupRun) -> list[Pass]:
    """Return the backward passes of a group, in order."""
    found = []
    for place, step in enumerate(group.steps):
        ordinal = 0
        for act in step.acts:
            if isinstance(act.event, Backward):
                before = _vector(run, act.before, None, step.scale)
                after = _vector(run, act.after, None, step.scale)
                grown = minus(after, before)
                found.append(Pass(place, ordinal, act.event.site, grown, before, after))
                ordinal += 1
    return found


def added_in(found: Iterable[Pass], place: int, names: Iterable[str]) -> Vector:
    """Return what all passes of one micro-batch added to some parameters."""
    wanted = set(names)
    parts = [{n: v for n, v in one.added.items() if n in wanted} for one in found if one.place == place]
    return added(parts)


@dataclass
class Change:
    """What happened to the gradients between two acts, or in a clip.

    Attributes:
        place: the micro-batch, from 0.
        what: ``"clip"``, or ``"edit"`` for anything that no clip function did.
        site: the line of the clip; empty for an edit.
        before: the gradients before, unscaled.
        after: the gradients after, unscaled.
        bound: the clip's bound; 0 for an edit.
    """

    place: int
    what: str
    site: str
    before: Vector
    after: Vector
    bound: float = 0.0


def changes(run: Run, group: GroupRun, names: Iterable[str], until: int) -> list[Change]:
    """Return what changed some gradients between the backward passes of micro-batches before ``until``.

    Clearing them is a change too: ``after`` is then empty or zero.
    """
    wanted = set(names)
    found = []
    last: tuple[int, GradientAct, float] | None = None
    for place, step in enumerate(group.steps):
        for act in step.acts:
            if last is not None and last[0] < until and not isinstance(last[1].event, OptimizerStep):
                before = _named(run, last[1].after, wanted, last[2])
                after = _named(run, act.before, wanted, last[2])
                if _differ(before, after):
                    found.append(Change(last[0], "edit", "", before, after))
            if isinstance(act.event, Clip) and place < until:
                before, after = (_named(run, held, wanted, step.scale) for held in (act.before, act.after))
                if _differ(before, after):
                    found.append(Change(place, "clip", act.event.site, before, after, act.event.bound))
            last = place, act, step.scale
    return found


def _differ(a: Vector, b: Vector) -> bool:
    if a.keys() == b.keys() and all(a[name] is b[name] for name in a):
        return False  # the log keeps one copy of what stays as it is: the arithmetic below takes long for many of them
    return norm(minus(a, b)) > 1e-6 * max(norm(a), norm(b))


def _named(run: Run, held: Mapping[int, Tensor], wanted: set[str], scale: float) -> Vector:
    return {name: value for name, value in _vector(run, held, None, scale).items() if name in wanted}


def _vector(run: Run, held: Mapping[int, Tensor], indices: set[int] | None, scale: float) -> Vector:
    return {
        run.name(index): value if scale == 1.0 else value / scale
        for index, value in held.items()
        if indices is None or index in indices
    }
