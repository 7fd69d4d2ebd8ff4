"""Notes on exceptions that come from the person's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noted(note: str | Callable[[], str]) -> Iterator[None]:
    """Add a note to an exception that passes through (Python 3.11 and later; 3.10 has no notes).

    Args:
        note: Where the exception comes from, such as ``"raised in step 3"``; a function is called only when one passes.
    """
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(note if isinstance(note, str) else note())
        raise
