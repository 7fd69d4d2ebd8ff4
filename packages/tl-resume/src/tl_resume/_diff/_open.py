"""What can be compared: states in memory, live setups, files and folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tl_core import TrainingSetup
from tl_resume._diff._folders import INDEX, open_folder, open_index
from tl_resume._diff._sections import split
from tl_resume._diff._sources import Source, open_file
from tl_resume._state import training_state


def open_source(given: Any, argument: str, stack: ExitStack) -> Source:
    """Open one side of a comparison.

    Args:
        given: A nested dict, a ``TrainingSetup``, or the path of a file or folder.
        argument: What it was passed as, for messages.
        stack: What closes its files at the end.

    Raises:
        StateFileError: A file is damaged, or of a kind that cannot be read.
        OSError: A file cannot be opened.
        TypeError: It is something else.
    """
    if isinstance(given, TrainingSetup):
        return Source("the setup", split(training_state(given)), "a live setup")
    if isinstance(given, (str, os.PathLike)):
        return open_path(Path(given), stack)
    if isinstance(given, Mapping):
        return Source(argument, split(given), "a state in memory")
    hint = f": pass {argument}.state_dict()" if callable(getattr(given, "state_dict", None)) else ""
    raise TypeError(
        f"{argument} must be a state (a nested dict), a TrainingSetup or the path of a file or folder, "
        f"got a {type(given).__name__}{hint}"
    )


def open_path(path: Path, stack: ExitStack) -> Source:
    """Open a file or a folder.

    Raises:
        StateFileError: It is damaged, or of a kind that cannot be read.
        OSError: It cannot be opened.
    """
    if path.is_dir():
        return open_folder(path, stack)
    if path.name.endswith(INDEX) and path.is_file():
        return open_index(path, stack)
    return open_file(path, stack)
