"""What is known of a run over full batches or micro-batches, of its groups and of each call of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tl_accum._copies import Copies
from tl_accum._switch import Met
from tl_core import TrainingSetup
from tl_telemetry import (
    GradientAct,
    Outside,
    Piece,
    StateCapture,
    StateDifference,
    StepRecord,
    TrainingRun,
    capture_state,
)


@dataclass
class MicroStep:
    """One call of a step.

    Attributes:
        index: ``setup.step_index`` in it.
        record: what was observed.
        acts: the gradients around each backward pass, clip and optimizer step.
        changed: what of the setup's state the call changed; gradients are left out.
        scale: the loss scale before it; 1 without a GradScaler.
    """

    index: int
    record: StepRecord
    acts: list[GradientAct]
    changed: list[StateDifference]
    scale: float

    def has(self, kind: type) -> bool:
        """Tell whether an event of a kind was observed."""
        return any(isinstance(event, kind) for event in self.record.events)


@dataclass
class GroupRun:
    """The calls of one group.

    Attributes:
        steps: the calls, one a micro-batch (one in all for a full batch).
        start: the state before the first one.
        end: the state after the last one.
    """

    steps: list[MicroStep]
    start: StateCapture
    end: StateCapture

    def has(self, kind: type) -> bool:
        """Tell whether an event of a kind was observed in one of the calls."""
        return any(step.has(kind) for step in self.steps)


@dataclass
class Run:
    """One run over all groups.

    Attributes:
        setup: the setup, as the run left it.
        training: what was observed.
        met: what the switch met.
        groups: the groups, in order.
        drew: whether steps drew random numbers.
        outside: what the loop keeps outside of the setup.
        copies: keeps the content of captured tensors.
        moved_in_forward: names of the buffers that forward passes moved.
    """

    setup: TrainingSetup
    training: TrainingRun
    outside: Outside
    copies: Copies
    moved_in_forward: list[str]
    met: Met = field(default_factory=Met)
    groups: list[GroupRun] = field(default_factory=list)

    def capture(self) -> StateCapture:
        """Capture the state of the setup, and of what the loop keeps outside of it."""
        self.copies.begin()
        capture = capture_state(self.setup, outside=self.outside.values(), keep=self.copies.keep)
        del capture.pieces[Piece("gradients")]  # each act tells of them; comparing them too would cost the most
        return capture

    def name(self, index: int) -> str:
        """Return the name of a followed parameter."""
        return self.training.facts.tensors.name(index)

    @property
    def drew(self) -> bool:
        changes = (change for group in self.groups for step in group.steps for change in step.changed)
        return any(change.piece.kind == "rng" or change.kind == "generator" for change in changes)


@dataclass(frozen=True)
class Frozen:
    """What runs with fixed statistics, to see whether something else differs too.

    Attributes:
        batch_norm: whether batch statistics are replaced by fixed ones.
        modules: names of the modules that run in eval mode.
    """

    batch_norm: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A part of the state.

    Attributes:
        piece: the piece.
        key: the attribute or entry of it; None for the whole piece.
    """

    piece: Piece
    key: Any = None

    def as_in(self, earlier: StateCapture, now: StateCapture) -> StateCapture:
        """Return a capture that has this part as it was earlier, and the rest of its piece as it is now."""
        before, after = earlier.pieces.get(self.piece), now.pieces.get(self.piece)
        held, holds = getattr(before, "items", None), getattr(after, "items", None)
        if self.key is None or held is None or holds is None or self.key not in held:
            return earlier
        mixed: Any = replace(after, items={**holds, self.key: held[self.key]})  # type: ignore[type-var]
        return replace(now, pieces={**now.pieces, self.piece: mixed}, nodes={**now.nodes, **earlier.nodes})
