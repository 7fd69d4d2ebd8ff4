"""Notes on exceptions that come from the person's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an exception that passes through (Python 3.11 and later; 3.10 has no notes)."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(note)
        raise
