"""What is wrong with a file."""

from __future__ import annotations


class StateFileError(ValueError):
    """A file cannot be read as a training state: damaged, incomplete, of another kind, or of a newer version.

    The message names the file first.
    """


StateFileError.__module__ = "tl_resume"
