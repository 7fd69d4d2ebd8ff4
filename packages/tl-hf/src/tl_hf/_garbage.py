"""Keeps the garbage collections that each training begins with short."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_collections() -> Iterator[None]:
    """Leave everything that is there now out of garbage collections, for a while.

    A Trainer calls ``gc.collect()`` at the beginning of each training, and that goes through all of torch and
    transformers: a check with twenty tiny trainings would do little else.
    """
    if gc.get_freeze_count():  # somebody else's, which unfreeze() would undo
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
