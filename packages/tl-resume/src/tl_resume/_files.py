"""Saving the training state of a setup to a file, and loading it."""

from __future__ import annotations

import os
from pathlib import Path

from tl_core import TrainingSetup
from tl_resume._format import StateFile, write_state
from tl_resume._format._write import progress_bar
from tl_resume._restore import restore
from tl_resume._state import training_state


def save_training_state(setup: TrainingSetup, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Save all that a run needs to go on, to one file, at once and for good.

    The file is one that the safetensors library reads, with the tensors under their names; nothing is pickled. It is
    written beside the target, synced to the disk, and takes the target's place in one go, so that the old file or the
    new one is there whatever happens. What is saved is listed at ``training_state``.

    An attribute of the setup that is neither plain data nor an object with ``state_dict()`` and ``load_state_dict()``
    is not saved, and nothing is said about it: it may be a function, a dataset or a logger. Where such an object holds
    what training needs to go on, give it the two methods. In ``setup.state`` it is an error that names it.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> setup.step_index = 7
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_training_state(setup, f"{folder}/last.safetensors")
        ...     setup.step_index = 0
        ...     load_training_state(setup, f"{folder}/last.safetensors")
        7

    Args:
        setup: The setup; it is not changed.
        path: The file to write or to replace, ``"last.safetensors"``. A link is kept, what it points at is replaced.
        progress: Show a bar; needs ``rich``.

    Raises:
        TypeError: Something of the state cannot be saved; the message names it. Nothing has been written.
        ValueError: ``path`` is a folder or another thing that is no file, or the state is nested too deeply.
        OSError: The disk is full, or the folder cannot be written. An old file is as it was, and nothing is left over.
    """
    write_state(path, training_state(setup), progress=progress)


def load_training_state(setup: TrainingSetup, path: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Load a file of ``save_training_state`` into a setup, and go on as if the run had never stopped.

    All is checked before the setup is touched: the file's header and digests, names, shapes and dtypes. Tensors are
    then read one by one into their places. Parameters are found by name: a compiled or wrapped model loads the file of
    a plain one, and the other way round.

    When an object's own ``load_state_dict`` raises, what was restored before it is put back: the old state of such
    objects is kept in memory for that long, and so are the optimizers' moments where they had some. What is copied
    after that (the tensors of modules, modes, generators) fits, so only a disk that fails between checking and reading,
    or a module's load hook that raises the second time it is called, leaves it half done.

    Plain data are brought back in the dicts, lists and tensors that the setup has. An object gets its tensors on the
    devices where its own ``state_dict()`` has them; a tensor that the setup does not have yet comes on the CPU. What
    the saved setup held as an iterator of its torchdata ``StatefulDataLoader``, the loader makes anew once its state
    is loaded, and so is the iterator that the fresh setup has.

    Args:
        setup: A setup built as the saved one was.
        path: The file.
        progress: Show a bar; needs ``rich``.

    Returns:
        ``step_index`` as it was saved, which the setup has again.

    Raises:
        StateFileError: The file is damaged, no training state, or of a newer version.
        ValueError: The file does not fit the setup, or an object of it refused its state; the setup is as it was.
        OSError: The file is not there or cannot be read.
    """
    if not isinstance(setup, TrainingSetup):
        raise TypeError(f"setup must be a TrainingSetup, got a {type(setup).__name__}")
    with StateFile(path) as file:
        total = sum(entry.nbytes for entry in file.tensors.values())
        with progress_bar(progress, f"loading {Path(path).name}", total) as advance:
            restore(setup, file, advance)
    return setup.step_index
