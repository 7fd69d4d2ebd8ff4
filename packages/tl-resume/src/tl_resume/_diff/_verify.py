"""A state file held against its digests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tl_resume._diff._lines import Line, counted
from tl_resume._diff._stored import read_header
from tl_resume._diff._values import size
from tl_resume._format import StateFile, StateFileError
from tl_resume._format._header import FORMAT_VERSION, KEY, stated_version


@dataclass(frozen=True)
class Verification:
    """Say whether a state file is what was written.

    Attributes:
        path: The file.
        intact: Whether all is as it was written.
        num_tensors: Tensors that were checked.
        tensor_bytes: Their size.
        file_bytes: That of the file.
        damaged: The tensors whose bytes are not those that were written.
        fault: What is wrong with the file as a whole, else None.
    """

    path: str
    intact: bool
    num_tensors: int
    tensor_bytes: int
    file_bytes: int
    damaged: list[str]
    fault: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def lines(self) -> list[Line]:
        """Write it."""
        if self.fault is not None:
            return [[("damaged", "bad"), (f": {self.fault}", "")]]
        extent = f"{counted(self.num_tensors, 'tensor')} of {size(self.tensor_bytes)}, file of {size(self.file_bytes)}"
        if self.intact:
            return [[("intact", "good"), (f": {self.path} ({extent})", "")]]
        of = f"{len(self.damaged):,} of {counted(self.num_tensors, 'tensor')}"
        return [
            [("damaged", "bad"), (f": {self.path}: {of} do not match their digests", "")],
            *([(f"  {name}", "name")] for name in self.damaged),
        ]


def verify(path: Path) -> Verification:
    """Check a state file against the digests that it carries, in constant memory.

    Raises:
        StateFileError: It carries none: it is no state file, or one of a newer version.
        OSError: It cannot be opened.
    """
    try:
        file = StateFile(path)
    except StateFileError as error:
        if not _is_ours(path):
            raise StateFileError(f"{path}: carries no digests, only state files of tl-resume do") from None
        if _version(path) > FORMAT_VERSION:
            raise
        return Verification(str(path), False, 0, 0, path.stat().st_size, [], str(error))
    with file:
        damaged = file.damaged()
        num_bytes = sum(entry.nbytes for entry in file.tensors.values())
        return Verification(str(path), not damaged, len(file.tensors), num_bytes, path.stat().st_size, damaged)


def _is_ours(path: Path) -> bool:
    """Say whether a file that cannot be opened as a state file was one; by its first bytes where it is cut off."""
    if path.is_file():
        if _version(path):
            return True
        try:
            metadata = read_header(path)[0].get("__metadata__")
        except StateFileError:
            return False
        return isinstance(metadata, dict) and KEY in metadata
    return False


def _version(path: Path) -> int:
    with path.open("rb") as file:
        return stated_version(file.read(128)) or 0
