"""Where a group of micro-batches differs from its full batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_accum._runs import GroupRun, Run
from tl_accum._tolerance import Bounds
from tl_accum._updates import Update, updates
from tl_accum._vectors import Vector, dot, is_measured, largest
from tl_core import parameter_names
from tl_telemetry import Piece, SchedulerStep, StateCapture, StateDifference, compare_captures

# How much further a weight may move than its gradient's error explains: the optimizer's own rounding.
OPTIMIZER_SLACK = 10.0
# The kinds of pieces that are kept beside the model.
STATE_KINDS = ("state", "attribute", "module attributes", "outside")
# How far an average may move otherwise, beside what it shares with the weights: of its movement.
STATE_SLACK = 0.05


@dataclass(frozen=True)
class ParameterGap:
    """How one parameter's gradient, or its movement, differs.

    Attributes:
        name: the parameter.
        expected: with the full batch, where the two lie furthest apart.
        got: accumulated, there.
    """

    name: str
    expected: float
    got: float


@dataclass
class GradientGap:
    """How the gradients of one update differ.

    Attributes:
        optimizer: the optimizer.
        expected: the full batch's update.
        got: the accumulated one.
        before_clipping: whether they differ before clipping already.
        parameters: what differs, before clipping where that is so, else as applied.
    """

    optimizer: str
    expected: Update
    got: Update
    before_clipping: bool
    parameters: list[ParameterGap]

    @property
    def vectors(self) -> tuple[Vector, Vector]:
        """What is expected and what was got, where they differ first."""
        if self.before_clipping:
            return self.expected.accumulated, self.got.accumulated
        return self.expected.applied, self.got.applied


@dataclass
class GroupGap:
    """Everything in which a group differs.

    Attributes:
        number: which group.
        timing: optimizers whose updates are not one for one, at the group's end.
        gradients: updates whose gradients differ.
        weights: parameters that moved otherwise.
        buffers: buffers that moved otherwise.
        settings: settings of parameter groups that differ, the learning rate among them.
        schedulers: names of schedulers whose state or number of steps differs.
        state: tensors of the size of weights, kept beside the model, that moved otherwise.
    """

    number: int
    timing: list[str]
    gradients: list[GradientGap]
    weights: list[ParameterGap]
    buffers: list[str]
    settings: list[StateDifference]
    schedulers: list[str]
    state: list[tuple[Piece, ParameterGap]]

    @property
    def in_step(self) -> bool:
        """Whether updates and weights agree, so that the next group can be compared by itself."""
        return not (self.timing or self.gradients or self.weights)

    @property
    def only_weights(self) -> bool:
        """Whether weights moved otherwise although the same updates were made, with the same settings."""
        return bool(self.weights) and not (self.timing or self.gradients or self.settings)

    @property
    def agrees(self) -> bool:
        """Whether nothing that counts differs."""
        return not (self.timing or self.gradients or self.weights or self.settings or self.schedulers or self.state)


def group_gap(reference: Run, run: Run, number: int, bounds: Bounds, replayed: Run | None = None) -> GroupGap:
    """Compare one group of two runs.

    Args:
        reference: the run over full batches.
        run: the run over micro-batches.
        number: which group.
        bounds: the tolerance.
        replayed: the run over full batches with the gradients of the other: it tells how weights move with those.
    """
    full, parts = reference.groups[number], run.groups[number]
    wanted, made = updates(reference, full), updates(run, parts)
    last = len(parts.steps) - 1
    timing = [
        name
        for name in dict.fromkeys([*wanted, *made])
        if len(wanted.get(name, ())) != len(made.get(name, ())) or any(u.place != last for u in made.get(name, ()))
    ]
    gradients: list[GradientGap] = []
    for name in wanted:
        if name in timing:
            continue
        for expected, got in zip(wanted[name], made[name], strict=True):
            gap = _gradient_gap(name, expected, got, bounds)
            if gap is not None:
                gradients.append(gap)
    applied = [update for name in wanted for update in wanted[name]]
    weights, buffers = _moved(reference, run, number, bounds, applied)
    if weights and replayed is not None:
        weights, _ = _moved(replayed, run, number, bounds, applied)
    if timing:  # what moves with the updates moves when they do
        return GroupGap(number, timing, gradients, weights, buffers, settings=[], schedulers=[], state=[])
    return GroupGap(
        number,
        timing,
        gradients,
        weights,
        buffers,
        _settings(full.end, parts.end),
        _schedulers(full, parts),
        _state(full, parts, run, bounds),
    )


def _gradient_gap(name: str, expected: Update, got: Update, bounds: Bounds) -> GradientGap | None:
    for before, a, b in (
        (True, expected.accumulated, got.accumulated),
        (False, expected.applied, got.applied),
    ):
        found = list(_gaps(a, b, bounds.of(a)))
        if found:
            return GradientGap(name, expected, got, before, found)
    return None


def _gaps(expected: Vector, got: Vector, allowed: Mapping[str, float]) -> list[ParameterGap]:
    found = []
    for name in dict.fromkeys([*expected, *got]):
        a, b = expected.get(name), got.get(name)
        # no gradient is a gradient of 0
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None
        assert b is not None
        limit = allowed.get(name, max(allowed.values(), default=0.0))
        if (gap := _gap(name, a, b, limit)) is not None:
            found.append(gap)
    return found


def _gap(name: str, expected: Tensor, got: Tensor, allowed: float | Tensor) -> ParameterGap | None:
    if expected.shape != got.shape:
        return ParameterGap(name, float("nan"), float("nan"))
    distance = (got - expected).abs()
    different = ~(distance <= allowed) & ~(torch.isnan(expected) & torch.isnan(got)) & (expected != got)
    if not bool(different.any()):
        return None
    place = int(torch.where(different, distance.nan_to_num(float("inf")), -1.0).flatten().argmax())
    a, b = (_number(tensor.flatten()[place]) for tensor in (expected, got))
    return ParameterGap(name, a, b)


def _number(value: Tensor) -> float:
    return float(value.abs()) if value.is_complex() else float(value)


def tensors_of(capture: StateCapture, piece: Piece) -> dict[str, Tensor]:
    """Return the tensors of a piece by their place, joined by dots."""
    return {".".join(map(str, path)): tensor for path, tensor in capture.contents(piece)}


def _moved(
    reference: Run, run: Run, number: int, bounds: Bounds, made: list[Update]
) -> tuple[list[ParameterGap], list[str]]:
    """Compare how far weights and buffers moved in a group.

    A weight's own gradient tells how far it may be off: where it is as small as its error, an optimizer that divides
    by its size (Adam) moves the weight by a whole learning rate, in a direction that rounding decides.
    """
    pairs = [(one.groups[number].start, one.groups[number].end) for one in (reference, run)]
    held = [[tensors_of(capture, Piece("weights")) for capture in pair] for pair in pairs]
    parameters = parameter_names(run.setup.model)
    errors: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    for update in made:
        errors |= bounds.of(update.applied)
        gradients |= update.applied
    weights, buffers = [], []
    for name, start in held[0][0].items():
        others = [side.get(name) for pair in held for side in pair]
        if any(tensor is None or tensor.shape != start.shape for tensor in others) or not _is_comparable(start):
            continue
        (before, after), (before_got, after_got) = ((pair[0][name], pair[1][name]) for pair in held)
        moved, moved_got = after - before, after_got - before_got
        furthest = largest({name: moved})
        size = largest({name: after})
        allowed: float | Tensor = OPTIMIZER_SLACK * bounds.relative * furthest + 8 * torch.finfo(after.dtype).eps * size
        if name not in parameters:
            if _gap(name, moved, moved_got, allowed) is not None:
                buffers.append(name)
            continue
        if name in gradients and gradients[name].shape == start.shape:
            share = errors[name] / gradients[name].abs().clamp(min=torch.finfo(torch.float32).tiny)
            allowed = allowed + 2.0 * furthest * share.clamp(max=1.0)
            if float(gradients[name].abs().max()) <= errors[name]:
                continue  # nothing but rounding
        if (gap := _gap(name, moved, moved_got, allowed)) is not None:
            weights.append(gap)
    return weights, buffers


def _is_comparable(tensor: Tensor) -> bool:
    return is_measured(tensor) and tensor.numel() > 0


def _settings(a: StateCapture, b: StateCapture) -> list[StateDifference]:
    return [d for d in compare_captures(a, b, rtol=1e-6) if d.piece.kind == "param groups"]


def _schedulers(full: GroupRun, parts: GroupRun) -> list[str]:
    """Return the schedulers that stepped another number of times."""
    wanted, made = scheduler_steps(full), scheduler_steps(parts)
    return [
        name
        for name in dict.fromkeys([*wanted, *made])
        if sum(count for _, count in wanted.get(name, ())) != sum(count for _, count in made.get(name, ()))
    ]


def scheduler_steps(group: GroupRun) -> dict[str, list[tuple[int, int]]]:
    """Return, by scheduler, the micro-batches in which it stepped, and how often."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place, step in enumerate(group.steps):
        for event in step.record.events:
            if isinstance(event, SchedulerStep):
                found.setdefault(event.scheduler, []).append((place, event.count))
    return found


def _state(full: GroupRun, parts: GroupRun, run: Run, bounds: Bounds) -> list[tuple[Piece, ParameterGap]]:
    """Compare how tensors moved that have the shapes of weights: averages of the weights, and the like.

    What follows the weights differs as they do. What tells is that it moves in other calls than the updates, or by a
    multiple of what it should.
    """
    shapes = {tuple(parameter.shape) for parameter in run.setup.model.parameters()}
    found = []
    for piece in parts.end.pieces:
        if piece.kind not in STATE_KINDS:
            continue
        sides = [tensors_of(capture, piece) for capture in (full.start, full.end, parts.start, parts.end)]
        expected: Vector = {}
        got: Vector = {}
        gaps = []
        for name, start in sides[0].items():
            held = [side.get(name) for side in sides]
            # a tensor of one element may be a bias's average, and is rather a running loss
            if tuple(start.shape) not in shapes or start.numel() < 2 or not _is_comparable(start):
                continue
            if any(tensor is None or tensor.shape != start.shape for tensor in held):
                continue
            expected[name], got[name] = sides[1][name] - start, sides[3][name] - sides[2][name]
            eps = 8 * torch.finfo(start.dtype).eps * largest({name: sides[1][name]})
            allowed = OPTIMIZER_SLACK * bounds.relative * largest({name: expected[name]}) + eps
            if (gap := _gap(name, expected[name], got[name], allowed)) is not None:
                gaps.append((piece, gap))
        square = dot(expected, expected)
        multiple = dot(expected, got) / square if square else 1.0
        if gaps and (_moves_elsewhere(piece, full, parts) or abs(multiple - 1.0) > STATE_SLACK):
            found += gaps
    return found


def moving_places(group: GroupRun, piece: Piece) -> list[int]:
    """Return the micro-batches in which something of a piece changed: tensors, or numbers (a counter of updates)."""
    return [place for place, step in enumerate(group.steps) if any(change.piece == piece for change in step.changed)]


def _moves_elsewhere(piece: Piece, full: GroupRun, parts: GroupRun) -> bool:
    wanted, made = moving_places(full, piece), moving_places(parts, piece)
    last = len(parts.steps) - 1
    return any(place != last for place in made) or bool(wanted) != bool(made)
