"""Establishes which of the pieces that differ after loading make the runs part, by running the resumed half again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tl_telemetry import Piece

MAX_COST = 8.0  # of the whole check, in runs of the loop


@dataclass(frozen=True)
class Cause:
    """What was established.

    Attributes:
        complete: whether putting every differing piece back gives the uninterrupted run; else nothing is established.
        pieces: the pieces whose omission makes the runs part: one, or the smallest set that was found.
        enough: whether putting these alone back gives the uninterrupted run.
        untried: pieces of which it was not tried whether they matter, since that would have cost too much.
    """

    complete: bool
    pieces: tuple[Piece, ...]
    enough: bool
    untried: tuple[Piece, ...] = ()


Parts = Callable[[frozenset[Piece]], bool]


def establish(pieces: Sequence[Piece], parts: Parts, max_trials: int) -> Cause:
    """Find the pieces that make the runs part.

    Args:
        pieces: those that differ after loading.
        parts: runs the resumed half with some pieces put back, and tells whether it still parts from the
            uninterrupted run.
        max_trials: how often ``parts`` may be called; at least once.

    Returns:
        The cause.
    """
    everything = frozenset(pieces)
    known: dict[frozenset[Piece], bool] = {frozenset(): True}  # the resumed run itself

    def run(put: frozenset[Piece]) -> bool:
        if put not in known:
            known[put] = parts(put)
        return known[put]

    if not pieces or run(everything):
        return Cause(False, (), False)

    untried: list[Piece] = []

    def needed(group: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of a group without which the runs part."""
        put = everything - frozenset(group)
        if len(known) > max_trials and put not in known:
            untried.extend(group)
            return []
        if not run(put):
            return []
        if len(group) == 1:
            return list(group)
        half, before = len(group) // 2, len(untried)
        found = needed(group[:half]) + needed(group[half:])
        if len(untried) > before:
            return found
        # neither half alone: each makes up for the other, so that only both together matter
        return found or list(group)

    found = needed(list(pieces))
    enough = not run(frozenset(found)) if len(known) <= max_trials else False
    return Cause(True, tuple(found), enough, tuple(piece for piece in untried if piece not in found))
