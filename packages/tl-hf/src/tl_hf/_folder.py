"""Where the trainings of a check write, in place of the person's own ``output_dir``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import Trainer


class Folder:
    """A temporary ``output_dir``, which the trainings of one check have one after the other.

    It has one path for all of them, as the runs of a training that is resumed have: what a checkpoint and callbacks
    say of paths stays true.
    """

    def __init__(self) -> None:
        self._temporary = TemporaryDirectory(prefix="tl-hf-")
        self.path = Path(self._temporary.name) / "output"

    @contextmanager
    def lent(self, trainer: Trainer, content: Path | None = None) -> Iterator[None]:
        """Let a Trainer write here for a while, and nowhere else: neither to its own folder nor to the Hub.

        Args:
            trainer: the Trainer.
            content: what ``snapshot`` kept, to begin with. None: the folder is empty.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        if content is None:
            self.path.mkdir()
        else:
            shutil.copytree(content, self.path, symlinks=True)
        args = trainer.args
        own = args.output_dir, args.push_to_hub
        args.output_dir, args.push_to_hub = str(self.path), False
        try:
            yield
        except Exception as error:
            if str(own[0]) in str(error) and hasattr(error, "add_note"):  # a path that was not taken from args
                error.add_note(f"the check trains in a temporary folder instead of {own[0]}: see args.output_dir")
            raise
        finally:
            args.output_dir, args.push_to_hub = own

    def snapshot(self, path: Path) -> None:
        """Copy all that was written here to a path that does not exist yet."""
        shutil.copytree(self.path, path, symlinks=True)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        self._temporary.cleanup()
