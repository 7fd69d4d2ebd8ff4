"""What the three runs showed, and what follows from it: the findings are functions of this."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tl_core import Tolerance
from tl_resume._check._ablate import Cause
from tl_resume._check._loop import Loop, Run
from tl_resume._check._modules import FirstDifference
from tl_resume._check._origin import Origin, origin
from tl_resume._check._parting import Parting
from tl_resume._check._position import Position, describe_position
from tl_resume._check._runs import ResumedRun, SavingRun
from tl_telemetry import (
    Divergence,
    Piece,
    StateDifference,
    compare_captures,
    first_divergence,
    largest_gap,
)

StatePlace = tuple[Piece, tuple[object, ...]]  # where a value lies in a capture: in which piece, and below it

_NOISE_MARGIN = 3.0  # two repetitions show a part of what a third one may do
_UNREPEATABLE = 0.1  # relative: above this, a loop that differs from itself tells nothing about a resume


@dataclass
class Evidence:
    """The runs, and the first conclusions.

    Attributes:
        loop: what was run.
        resume_at: the step before which was saved.
        full: the uninterrupted run.
        save: the one that saves.
        resumed: the resumed one.
        tolerance: how far figures may lie apart.
        cause: what ablation established; None where nothing had to be.
        trials: the resumed halves of the ablation, by the pieces that were put back.
        warm_agrees: whether loading into a setup that was trained up to the checkpoint gives the uninterrupted run,
            where a fresh setup does not even with every difference put back; None where that was not tried.
        only_elsewhere: whether the runs part in a fresh process, and not in this one.
        decisions: the lines at which the loop decides by values that were lost, by place.
        told: the rules of the findings, for the notes.
        first_module: where the modules' outputs differ first, where nothing else explains that the runs part.
    """

    loop: Loop
    resume_at: int
    full: Run
    save: SavingRun
    resumed: ResumedRun
    tolerance: Tolerance
    cause: Cause | None = None
    trials: dict[frozenset[Piece], Run] = field(default_factory=dict)
    warm_agrees: bool | None = None
    only_elsewhere: bool = False
    decisions: dict[tuple[Piece, tuple[Any, ...]], str] = field(default_factory=dict)
    first_module: FirstDifference = field(default_factory=FirstDifference)
    told: tuple[str, ...] = ()

    @cached_property
    def weight_names(self) -> list[str]:
        """The names of all parameters and buffers of the model."""
        return [str(path[0]) for piece, path, _ in self.save.saved.digests() if piece.kind == "weights"]

    def holds_average(self, piece: Piece) -> bool:
        """Tell whether a piece holds a float tensor for each trained parameter: an average, a target network."""
        saved = self.save.saved
        trained = saved.trainable()
        wanted = Counter(shape for path, _, shape in saved.tensors(Piece("weights")) if path[0] in trained)
        held = Counter(shape for _, dtype, shape in saved.tensors(piece) if dtype.is_floating_point)
        return bool(wanted) and not wanted - held

    # -- the loop's own noise -----------------------------------------------------------------------------------

    @cached_property
    def noise(self) -> float:
        """How far the loop differs from itself when it is repeated, relative."""
        stop = self.resume_at if self.save.changed else None
        return largest_gap(self.full.trace, self.save.run.trace, stop=stop)

    @property
    def repeatable(self) -> bool:
        """Whether a difference of the runs tells anything."""
        return self.noise < _UNREPEATABLE

    @property
    def rtol(self) -> float:
        """The relative tolerance, widened to the loop's own noise."""
        return max(self.tolerance.rtol, _NOISE_MARGIN * self.noise)

    # -- saving -------------------------------------------------------------------------------------------------

    @cached_property
    def saving_parts(self) -> Divergence | None:
        """Where the losses or weights of the run that saved part from those of the one that did not."""
        rtol, atol = self.rtol, self.tolerance.atol
        return first_divergence(self.full.trace, self.save.run.trace, rtol=rtol, atol=atol, start=self.resume_at)

    # -- loading ------------------------------------------------------------------------------------------------

    @cached_property
    def differences(self) -> list[StateDifference]:
        """What differs between the state when saved and right after loading.

        Left out: what saving had changed to just the value that was loaded, since that is what it was saved as.
        """
        found = compare_captures(self.save.saved, self.resumed.loaded, rtol=self.tolerance.rtol)
        changed = {(d.piece, d.path): d for d in self.save.changed}
        return [d for d in found if not _is_as_changed(d, changed.get((d.piece, d.path)))]

    @cached_property
    def by_piece(self) -> dict[Piece, list[StateDifference]]:
        """The differences by piece, those of generators that the loop did not draw from left out."""
        grouped: dict[Piece, list[StateDifference]] = {}
        for difference in self.differences:
            if difference.piece.kind != "rng" or difference.piece in self.drawn_from:
                grouped.setdefault(difference.piece, []).append(difference)
        return grouped

    @cached_property
    def _set_by_load(self) -> set[StatePlace]:
        """The places that loading changed in the fresh setup."""
        return {(d.piece, d.path) for d in compare_captures(self.resumed.run.start, self.resumed.loaded)}

    def as_built(self, piece: Piece) -> bool:
        """Tell whether all that differs in a piece is as the fresh setup had it before loading."""
        touched = [path for changed, path in self._set_by_load if changed == piece]
        return not any(_overlap(path, difference.path) for path in touched for difference in self.by_piece[piece])

    @cached_property
    def drawn_from(self) -> set[Piece]:
        """The global generators that moved between saving and the end of the uninterrupted run."""
        moved = compare_captures(self.save.saved, self.full.finished)
        return {difference.piece for difference in moved if difference.piece.kind == "rng"}

    @cached_property
    def moved(self) -> set[StatePlace]:
        """The places that changed between the start of the run and saving."""
        return {(d.piece, d.path) for d in compare_captures(self.save.run.start, self.save.saved)}

    @cached_property
    def unsteady(self) -> set[StatePlace]:
        """The places that differ between two repetitions of one run: timers, ids."""
        if self.save.changed:
            return set()
        return {(d.piece, d.path) for d in compare_captures(self.full.finished, self.save.run.finished, rtol=self.rtol)}

    # -- after resuming -----------------------------------------------------------------------------------------

    def parted(self, run: Run) -> Parting | None:
        """Find where a run parts from the uninterrupted one: in its losses, its weights on the way or at the end."""
        if run.error is not None:
            return Parting(max(run.trace.steps, default=self.resume_at - 1) + 1, raised=run.error)
        rtol, atol = self.rtol, self.tolerance.atol
        found = first_divergence(self.full.trace, run.trace, rtol=rtol, atol=atol, start=self.resume_at)
        if found is not None:
            return Parting(found.step, found)
        at_end = compare_captures(self.full.finished, run.finished, rtol=rtol, atol=atol)
        state = next((d for d in at_end if self._is_training_state(d)), None)
        return None if state is None else Parting(self.loop.steps - 1, state=state)

    def _is_training_state(self, difference: StateDifference) -> bool:
        """Tell whether a difference at the end means that the runs part: it was not there after loading.

        A value that was lost is judged by itself; here it is about what was restored and went another way all the
        same. Of plain attributes only tensors like the weights count (averages): others may be output.
        """
        piece, path = difference.piece, difference.path
        if piece.kind == "weights":
            return difference.tensor is not None
        kinds = ("optimizer state", "scheduler", "scaler", "state")
        average = difference.tensor is not None and self.holds_average(piece)
        if piece.kind not in kinds and not (piece.kind == "attribute" and average):
            return False
        # what save() changed is judged by itself too
        judged = (*self.differences, *self.save.changed)
        lost = any(is_at((piece, path), d) for d in judged)
        return not lost and (piece, path) not in self.unsteady

    @cached_property
    def diverged(self) -> Parting | None:
        """Where the resumed run parts from the uninterrupted one."""
        return self.parted(self.resumed.run) if self.repeatable else None

    @cached_property
    def still_different(self) -> set[StatePlace]:
        """The places that still differ from the uninterrupted run at the end.

        Where the runs part, that is told from the resumed half that had the cause put back, since weights that went
        another way take everything that follows them along.
        """
        run = self.trials.get(frozenset(self.cause.pieces)) if self.cause is not None and self.cause.enough else None
        end = (run or self.resumed.run).finished
        return {(d.piece, d.path) for d in compare_captures(self.full.finished, end, rtol=self.rtol)}

    @cached_property
    def only_lost_differs(self) -> bool:
        """Whether the runs agree, and at the end nothing differs but what was lost."""
        places = [(p, path) for p, path in self.still_different if p.kind not in ("gradients", "rng", "outside")]
        lost = [(d.piece, d.path) for d in self.differences]
        return self.diverged is None and all(
            place in self.unsteady or any(place[0] == piece and _overlap(place[1], path) for piece, path in lost)
            for place in places
        )

    def remains(self, difference: StateDifference) -> bool:
        """Tell whether a difference after loading is still one at the end."""
        return any(is_at(place, difference) for place in self.still_different)

    def is_cause(self, piece: Piece) -> bool:
        """Tell whether a piece was established as (a part of) what makes the runs part."""
        return self.cause is not None and self.cause.complete and piece in self.cause.pieces

    def is_untried(self, piece: Piece) -> bool:
        """Tell whether it was left untried whether a piece makes the runs part."""
        return self.cause is not None and piece in self.cause.untried

    @cached_property
    def position(self) -> Position:
        """What became of the data's position in the resumed run."""
        return self._position_of(self.resumed.run)

    @property
    def draws_by_itself(self) -> bool:
        """Tell whether the loop was seen to draw batches itself: from a loader, or from what could not be copied."""
        assert self.full.ledger is not None
        return bool(self.save.saved.uncopied) or any(self.full.ledger.drawn.values())

    @cached_property
    def position_put_back(self) -> Position:
        """The same, with everything put back that differed after loading, where that was tried."""
        return self._position_of(self.trials.get(frozenset(self.by_piece), self.resumed.run))

    def _position_of(self, run: Run) -> Position:
        assert self.full.ledger is not None
        assert run.ledger is not None
        return describe_position(self.full.ledger, run.ledger, self.resume_at)

    @cached_property
    def left_behind(self) -> dict[str, list[str]]:
        """By optimizer, what those of its tensors were when saved that are nowhere in the setup after loading."""
        found = {}
        for name, groups in self.resumed.loaded.order.items():
            now = [place for group in groups for place in group]
            then = [place for group in self.save.saved.order.get(name, []) for place in group]
            pairs = zip(now, then, strict=False)
            lost = [was for place, was in pairs if place != was and place.startswith("param_groups[")]
            if lost:
                found[name] = lost
        return found

    def origin(self, piece: Piece) -> Origin | None:
        """Find where the wrong values of a piece come from."""
        return origin(self.by_piece[piece], self.save.saved, self.resumed.run.start, self.full.finished)


def is_at(place: StatePlace, difference: StateDifference) -> bool:
    """Tell whether a place is that of a difference, or lies below it."""
    piece, path = place
    return piece == difference.piece and path[: len(difference.path)] == difference.path


def _is_as_changed(loaded: StateDifference, changed: StateDifference | None) -> bool:
    return changed is not None and _same(loaded.b, changed.b)


def _same(a: object, b: object) -> bool:
    digest = getattr(a, "digest", None)
    return a == b if digest is None else digest == getattr(b, "digest", None)


def _overlap(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Tell whether one place is the other, or lies below it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
