"""The comparison: both runs, the loop's own noise, and what runs with fixed statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tl_accum._differences import GroupGap, group_gap
from tl_accum._plan import Plan
from tl_accum._runs import Frozen, Part, Run
from tl_accum._session import Session
from tl_accum._tolerance import Bounds, may_use_tf32
from tl_accum._updates import updates
from tl_accum._vectors import dot, largest, minus
from tl_core import module_names, parameter_names
from tl_telemetry import OptimizerStep, Piece, SkippedStep, compare_captures

# From this share of the gradients on, the loop's own noise leaves nothing to judge.
TOO_NOISY = 0.5
# How often the full batches are run, with other random numbers each time but the first.
NUM_DRAWS = 5
# From this spread of the gradients' scale on, not even that can be judged.
TOO_SPREAD = 0.25


@dataclass
class Comparison:
    """Both runs, and where they differ.

    Attributes:
        session: runs the loop.
        reference: the run over full batches.
        run: the run over micro-batches.
        gaps: of each group, what differs.
        bounds: the tolerance that was used.
        indices: the step index of each full batch.
        frozen: what ran with fixed statistics.
        noise: how far the loop lies from itself when it is repeated, relative to its gradients; 0 where it repeats.
        spread: how far the scale of its gradients lies from itself then; 0 where it repeats.
    """

    session: Session
    reference: Run
    run: Run
    gaps: list[GroupGap]
    bounds: Bounds
    indices: tuple[int, ...]
    frozen: Frozen
    noise: float = 0.0
    spread: float = 0.0

    @property
    def drew(self) -> bool:
        """Whether steps drew random numbers."""
        return self.reference.drew or self.run.drew

    @property
    def is_random(self) -> bool:
        """Whether random numbers that the steps draw change the gradients: only what is coarse can be judged then."""
        return self.drew and self.noise > 0.0

    @property
    def plan(self) -> Plan:
        return self.session.plan

    @property
    def agrees(self) -> bool:
        """Whether nothing that counts differs."""
        return all(gap.agrees for gap in self.gaps)

    @property
    def too_noisy(self) -> bool:
        """Whether the loop's own noise leaves nothing of the gradients to judge, not even their scale."""
        return self.noise >= TOO_NOISY and self.spread >= TOO_SPREAD

    @property
    def moved_by_hand(self) -> bool:
        """Whether the weights move with full batches although no optimizer of the setup steps."""
        names = parameter_names(self.reference.setup.model)
        steps = [step for group in self.reference.groups for step in group.steps]
        if any(step.has(OptimizerStep) or step.has(SkippedStep) for step in steps):
            return False
        changes = (change for step in steps for change in step.changed if change.piece == Piece("weights"))
        return any(".".join(map(str, change.path)) in names for change in changes)


def compare(session: Session, bounds: Bounds) -> Comparison:
    """Run both and compare them, again with the loop's own noise as a floor where it has some."""
    plan = session.plan
    indices = tuple(group.number for group in plan.groups)
    found = _compared(session, bounds, indices, Frozen())
    _check_fresh(found.reference, found.run)
    if not found.agrees and (other := _epoch_indices(found)) is not None:
        again = _compared(session, bounds, other, Frozen())
        if again.agrees:
            return again
    return found if found.agrees else _by_gradients(_with_floor(found))


def compare_frozen(found: Comparison) -> Comparison | None:
    """Run both again with fixed statistics where the model has some that differ by nature; None where it has none."""
    model = found.reference.setup.model
    owners = tuple(dict.fromkeys(name.rpartition(".")[0] for name in found.run.moved_in_forward))
    frozen = Frozen(found.reference.met.batch_norm or found.run.met.batch_norm, owners)
    if not (frozen.batch_norm or frozen.modules):
        return None
    norms = _batch_norms(model, owners)
    frozen = replace(frozen, modules=tuple(dict.fromkeys([*owners, *norms])))
    again = _compared(found.session, replace(found.bounds, floor={}), found.indices, frozen)
    return again if again.agrees else _by_gradients(_with_floor(again))


def _compared(session: Session, bounds: Bounds, indices: Sequence[int], frozen: Frozen) -> Comparison:
    reference = session.full(frozen=frozen, indices=indices)
    low = max(reference.met.low, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    bounds = replace(bounds, low=low, tf32=may_use_tf32(session.plan.device))
    gaps: list[GroupGap] = []

    def matches(run: Run, number: int) -> bool:
        gaps.append(group_gap(reference, run, number, bounds))
        return gaps[-1].in_step

    run = session.accumulated(frozen=frozen, reference=reference, matches=matches)
    return Comparison(session, reference, run, gaps, bounds, tuple(indices), frozen)


def _epoch_indices(found: Comparison) -> tuple[int, ...] | None:
    """Return the step index of each full batch by which an epoch ends where it ends for the micro-batches.

    None unless the runs agree up to the first end of an epoch: a loop that steps a scheduler after the last batch of an
    epoch knows it by its index.
    """
    plan = found.plan
    first = next(gap.number for gap in found.gaps if not gap.agrees)
    end = next((group.number for group in plan.groups if group.ends_epoch), None)
    if end is None or first < end:
        return None
    return tuple(g.number if g.number < end else g.first + len(g.parts) - 1 for g in plan.groups)


def _with_floor(found: Comparison) -> Comparison:
    """Measure how far the full batches' run lies from itself, and compare again with that as the floor."""
    session = found.session
    floor: dict[str, float] = {}
    relative = spread = 0.0
    until = next(gap.number for gap in found.gaps if not gap.agrees) + 1
    for draws in range(NUM_DRAWS) if found.drew else (0,):
        other = session.full(frozen=found.frozen, indices=found.indices, draws=draws, until=until)
        for number in range(until):
            wanted = updates(found.reference, found.reference.groups[number])
            made = updates(other, other.groups[number])
            for name, ours in wanted.items():
                for a, b in zip(ours, made.get(name, ()), strict=False):
                    apart = minus(a.accumulated, b.accumulated)
                    for parameter, value in apart.items():
                        floor[parameter] = max(floor.get(parameter, 0.0), largest({parameter: value}))
                    size = largest(a.accumulated)
                    relative = max(relative, largest(apart) / size if size else 0.0)
                    square = dot(a.accumulated, a.accumulated)
                    spread = max(spread, abs(dot(a.accumulated, apart)) / square if square else 0.0)
    if not any(floor.values()):
        return found
    again = _compared(session, replace(found.bounds, floor=floor), found.indices, found.frozen)
    again.noise, again.spread = relative, spread
    return again


def _by_gradients(found: Comparison) -> Comparison:
    """Compare weights again by what the full batches' loop makes of the gradients that were accumulated.

    An optimizer may make anything of gradients that agree: one that divides by their size turns a part that is nothing
    but rounding (a key bias's) into steps of full size, and one that normalises a whole parameter by its length moves
    the rest of it otherwise then.
    """
    first = _first_gap(found)
    if first is None or not first.only_weights:
        return found
    session, reference, bounds = found.session, found.reference, found.bounds
    in_step: list[bool] = []

    def matches(run: Run, number: int) -> bool:
        gap = group_gap(reference, run, number, bounds)
        in_step.append(gap.in_step or gap.only_weights)
        return in_step[-1]

    run = session.accumulated(frozen=found.frozen, reference=reference, matches=matches)
    until = (*in_step, False).index(False)
    replayed = session.replayed(frozen=found.frozen, indices=found.indices, reference=reference, run=run, until=until)
    gaps = [
        group_gap(reference, run, number, bounds, replayed if number < until else None)
        for number in range(len(in_step))
    ]
    again = replace(found, run=run, gaps=gaps)
    rest = _first_gap(again)
    return found if rest is not None and rest.only_weights and rest.number == first.number else again


def _first_gap(found: Comparison) -> GroupGap | None:
    return next((gap for gap in found.gaps if not gap.agrees), None)


def gap_with(found: Comparison, number: int, restored: Part) -> GroupGap:
    """Compare a group again with a part of the state put back before each of its micro-batches."""
    run = found.session.accumulated(
        frozen=found.frozen,
        reference=found.reference,
        matches=lambda _run, _number: True,
        until=number + 1,
        restored=restored,
    )
    return group_gap(found.reference, run, number, found.bounds)


def _check_fresh(a: Run, b: Run) -> None:
    """Raise the error of a ``make_setup`` that builds another setup in its second call.

    Raises:
        ValueError: weights, optimizer state or settings differ; the message names the first difference.
    """
    kinds = ("weights", "trainable", "optimizer state", "param groups")
    found = [d for d in compare_captures(a.groups[0].start, b.groups[0].start) if d.piece.kind in kinds]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"make_setup() built another setup in its second call, under the same seed: {found[0]}{more}. Build it "
            "anew each time, with random numbers from the global generators of torch, numpy or python, which are "
            "seeded before each call"
        )


def _batch_norms(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of the modules that normalise by the statistics of the batch, of those and all in training."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    known = set(names)
    return [
        name
        for name, module in module_names(model).items()
        if isinstance(module, kinds) and (name in known or (module.training and module.running_mean is None))
    ]
