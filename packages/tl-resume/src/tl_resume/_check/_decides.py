"""Whether the loop decides by what was lost: the resumed half runs once more, with lost values that notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import safe_globals

from tl_core import TrainingSetup
from tl_resume._check._evidence import Evidence
from tl_resume._check._loop import Session
from tl_resume._check._output import decides_about_output
from tl_resume._check._runs import resumed
from tl_resume._check._tracked import Decision, Decisions, TrackedTensors, track
from tl_telemetry import Piece, StateDifference


def deciding_lines(
    session: Session,
    evidence: Evidence,
    path: Path,
    lost: Sequence[StateDifference],
    idle: Iterable[StateDifference],
) -> dict[tuple[Piece, tuple[Any, ...]], str]:
    """Find the lines at which the loop decides by lost values.

    Left out are decisions that are only about output, those of a counter that was lost at the same place of its cycle
    (``step % 4``), and all if each came out otherwise in the resumed run and nothing else became different by it.

    Args:
        session: what the runs share.
        evidence: what the runs showed.
        path: the checkpoint.
        lost: numbers, strings and tensors of one element that were lost.
        idle: all that was lost and made no difference yet, histories too.

    Returns:
        By place, the first such line (``train.py:42``).
    """
    labels = {str(index): difference for index, difference in enumerate(lost)}
    names = {_last_name(difference) for difference in idle}
    decisions = _observed(session, evidence, path, labels, put=list(evidence.by_piece))
    seen = [d for d in decisions.seen if not _same_place_of_cycle(labels[d.label], d)]
    names -= {_last_name(labels[label]) for label in decisions.trains}
    deciding = _deciding(seen, labels, names)
    if deciding and evidence.only_lost_differs:
        otherwise = _observed(session, evidence, path, labels, put=[])
        if all(_came_out_otherwise(decision, decisions, otherwise) for decision in deciding):
            return {}
    return {
        (labels[decision.label].piece, labels[decision.label].path): _site(decision)
        for decision in sorted(deciding, key=lambda d: (d.code.co_filename, -d.line))
    }


def _observed(
    session: Session, evidence: Evidence, path: Path, labels: dict[str, StateDifference], put: list[Piece]
) -> Decisions:
    """Run the resumed half with values that notice, and return the decisions; none if the loop refuses such values.

    They are put in before each step: what a step sets anew (``bad = 0``) is followed too.
    """
    decisions = Decisions()
    tensors = TrackedTensors(decisions)

    def replace(setup: TrainingSetup) -> None:
        decisions.step = setup.step_index
        for label, difference in labels.items():
            root, names = _root(setup, difference)
            with suppress(AttributeError, LookupError, TypeError):  # it lies where nothing can be set
                _replace(root, names, partial(_watched, label=label, decisions=decisions, tensors=tensors))

    within = tensors if any(difference.kind == "tensor" for difference in labels.values()) else None
    saved, at = evidence.save.saved, evidence.resume_at
    with safe_globals([bool, int, float, str]):  # torch.load() makes of them what the loop itself saved meanwhile
        run = resumed(session, at, path, saved=saved, put=put, before_step=replace, within=within).run
    return decisions if run.error is None else Decisions()


def _came_out_otherwise(decision: Decision, one: Decisions, other: Decisions) -> bool:
    """Tell whether a decision came out otherwise in a step of two runs."""
    first, second = one.outcomes[decision], other.outcomes.get(decision, {})
    return any(outcome != second[step] for step, outcome in first.items() if step in second)


def _deciding(seen: list[Decision], labels: dict[str, StateDifference], lost: set[str]) -> list[Decision]:
    """Leave out what is only about output, and what only leads to lost values by which nothing is decided."""
    kept: list[Decision] = []
    while True:
        idle = lost - {_last_name(labels[decision.label]) for decision in kept}
        found = [d for d in seen if not _is_idle(d, idle | {_last_name(labels[d.label])})]
        if len(found) == len(kept):
            return found
        kept = found


def _is_idle(decision: Decision, settable: set[str]) -> bool:
    """Tell whether a decision leads to nothing; where no source is to be had, that is assumed."""
    return decides_about_output(decision.code, decision.line, decision.column, frozenset(settable)) is not False


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
