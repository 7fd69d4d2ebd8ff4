"""Whether the loop decides by what was lost: the resumed half runs once more, with lost values that notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import safe_globals

from tl_core import TrainingSetup
from tl_resume._check._loop import Session
from tl_resume._check._output import decides_about_output
from tl_resume._check._runs import resumed
from tl_resume._check._tracked import Decision, Decisions, TrackedTensors, track
from tl_telemetry import Piece, StateCapture, StateDifference


def deciding_lines(
    session: Session,
    resume_at: int,
    path: Path,
    saved: StateCapture,
    pieces: Iterable[Piece],
    lost: Iterable[StateDifference],
    idle: Iterable[StateDifference],
) -> dict[tuple[Piece, tuple[Any, ...]], str]:
    """Find the lines at which the loop decides by lost values.

    Args:
        session: what the runs share.
        resume_at: the step that the resumed run goes on from.
        path: the checkpoint.
        saved: the state when saved.
        pieces: the pieces that are put back, so that the run is the uninterrupted one.
        lost: numbers, strings and tensors of one element that were lost.
        idle: all that was lost and made no difference yet, histories too.

    Returns:
        By place, the first such line (``train.py:42``). Decisions that are only about output, and those of a counter
        that was lost at the same place of its cycle (``step % 4``), are left out.
    """
    decisions = Decisions()
    labels = {str(index): difference for index, difference in enumerate(lost)}
    tensors = TrackedTensors(decisions)

    def replace(setup: TrainingSetup) -> None:
        for label, difference in labels.items():
            root, names = _root(setup, difference)
            with suppress(AttributeError, LookupError, TypeError):  # it lies where nothing can be set
                _replace(root, names, partial(_watched, label=label, decisions=decisions, tensors=tensors))

    within = tensors if any(difference.kind == "tensor" for difference in labels.values()) else None
    with safe_globals([bool, int, float, str]):  # torch.load() makes of them what the loop itself saved meanwhile
        run = resumed(session, resume_at, path, saved=saved, put=pieces, replace=replace, within=within).run
    if run.error is not None:  # the loop does not take such values
        return {}
    seen = [d for d in decisions.seen if not _same_place_of_cycle(labels[d.label], d)]
    return {
        (labels[decision.label].piece, labels[decision.label].path): _site(decision)
        for decision in sorted(
            _deciding(seen, labels, {_last_name(difference) for difference in idle}),
            key=lambda d: (d.code.co_filename, -d.line),
        )
    }


def _deciding(seen: list[Decision], labels: dict[str, StateDifference], lost: set[str]) -> list[Decision]:
    """Leave out what is only about output, and what only leads to lost values by which nothing is decided."""
    kept: list[Decision] = []
    while True:
        idle = lost - {_last_name(labels[decision.label]) for decision in kept}
        found = [d for d in seen if decides_about_output(d.code, d.line, d.column, frozenset(idle)) is False]
        if len(found) == len(kept):
            return found
        kept = found


def _last_name(difference: StateDifference) -> str:
    names = [part for part in (difference.piece.name, *difference.path) if isinstance(part, str)]
    return names[-1]


def _site(decision: Decision) -> str:
    return f"{Path(decision.code.co_filename).name}:{decision.line}"


def _watched(value: Any, label: str, decisions: Decisions, tensors: TrackedTensors) -> Any:
    if isinstance(value, Tensor):
        tensors.watch(value, label)
        return value
    return track(value, decisions, frozenset([label]))


def _same_place_of_cycle(difference: StateDifference, decision: Decision) -> bool:
    saved, loaded = difference.plain_a, difference.plain_b
    if decision.modulus is None or not isinstance(saved, int) or not isinstance(loaded, int):
        return False
    return decision.modulus != 0 and (saved - loaded) % decision.modulus == 0


def _root(setup: TrainingSetup, difference: StateDifference) -> tuple[Any, tuple[Any, ...]]:
    """Return the object from which a lost value is reached, and the names, keys and indices on the way."""
    piece, path = difference.piece, difference.path
    if piece.kind == "module attributes":
        return setup.model.get_submodule(path[0]), path[1:]
    return setup, (piece.name, *path)


def _replace(holder: Any, names: tuple[Any, ...], make: Callable[[Any], Any]) -> Any:
    """Put another value in the place of one; returns the holder, which is a new one if it is a tuple."""
    key, *rest = names
    value = holder[key] if isinstance(holder, (dict, list, tuple)) else getattr(holder, key)
    made = _replace(value, tuple(rest), make) if rest else make(value)
    if made is value:
        return holder
    if isinstance(holder, tuple):
        items = [made if index == key else item for index, item in enumerate(holder)]
        return holder._make(items) if hasattr(holder, "_make") else tuple(items)
    if isinstance(holder, (dict, list)):
        holder[key] = made
    else:
        object.__setattr__(holder, key, made)
    return holder
