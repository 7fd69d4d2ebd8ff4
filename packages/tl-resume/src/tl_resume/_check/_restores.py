"""Sees which objects ``load`` restores, and what they hold when their ``load_state_dict`` returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tl_core import TrainingSetup
from tl_resume._check._loop import Session
from tl_telemetry import Piece, StateCapture, capture_state, compare_captures


@dataclass(frozen=True)
class Restored:
    """One call of ``load_state_dict`` of something that the setup holds.

    Attributes:
        pieces: the pieces of the setup that belong to the object.
        right: those of the pieces that were as saved when the call returned.
        missing: the keys that a module missed (``strict=False``).
        unexpected: the keys that it did not expect.
    """

    pieces: tuple[Piece, ...]
    right: tuple[Piece, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@contextmanager
def watch_restores(setup: TrainingSetup, session: Session, saved: StateCapture) -> Iterator[list[Restored]]:
    """Watch the calls of ``load_state_dict`` in a block, on this thread.

    A profile function sees every call without patching anything. One that is already there (a profiler's) is left
    alone: nothing is watched then.

    Args:
        setup: the setup that is restored.
        session: keeps what is captured.
        saved: the state when saved.
    """
    restored: list[Restored] = []
    if sys.getprofile() is not None:
        yield restored
        return

    def profile(frame: FrameType, event: str, returned: Any) -> None:
        if event != "return" or frame.f_code.co_name != "load_state_dict" or "self" not in frame.f_locals:
            return
        sys.setprofile(None)
        try:
            owner = frame.f_locals["self"]
            pieces = tuple(_pieces_of(owner, setup))
            if pieces:
                restored.append(_restored(pieces, returned, setup, session, saved))
        finally:
            sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        yield restored
    finally:
        if sys.getprofile() is profile:
            sys.setprofile(None)


def _restored(
    pieces: tuple[Piece, ...], returned: Any, setup: TrainingSetup, session: Session, saved: StateCapture
) -> Restored:
    now = capture_state(setup, keep=session.store.mark)
    differing = {difference.piece for difference in compare_captures(saved, now)}
    right = tuple(piece for piece in pieces if piece not in differing)
    missing = getattr(returned, "missing_keys", ())
    unexpected = getattr(returned, "unexpected_keys", ())
    return Restored(pieces, right, tuple(missing), tuple(unexpected))


def _pieces_of(owner: Any, setup: TrainingSetup) -> Iterator[Piece]:
    if owner is setup.model or owner is getattr(setup.model, "_orig_mod", None):
        yield Piece("weights")
    for name, optimizer in setup.optimizers.items():
        if owner is optimizer:
            yield Piece("optimizer state", name)
            yield Piece("param groups", name)
    for name, scheduler in setup.schedulers.items():
        if owner is scheduler:
            yield Piece("scheduler", name)
    if owner is setup.scaler:
        yield Piece("scaler")
    for name, entry in setup.state.items():
        if owner is entry:
            yield Piece("state", name)
