"""What is wrong with a file, or with a state for one, and how messages show a value."""

from __future__ import annotations

from typing import Any


class StateFileError(ValueError):
    """A file cannot be read as a training state: damaged, incomplete, of another kind, or of a newer version.

    The message names the file first.
    """


StateFileError.__module__ = "tl_resume"


def short(value: Any) -> str:
    """Write a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than python writes
        text = "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."
