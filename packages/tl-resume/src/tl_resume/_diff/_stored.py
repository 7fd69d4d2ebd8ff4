"""Tensors that lie in a safetensors file, read a chunk at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_resume._format import StateFileError
from tl_resume._format._dtypes import DTYPE_NAMES, FROM_FILE
from tl_resume._format._header import MAX_HEADER_BYTES

# One chunk of each side and the CPU's cache: measured, larger ones are slower. A multiple of every element's size.
CHUNK_BYTES = 1 << 20
# Numbers smaller than a byte: torch cannot compute with them, their bytes are compared.
_PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Point at a tensor's bytes in an open file.

    Attributes:
        file: The open file, unbuffered.
        offset: Where the bytes begin in it.
        dtype: The element type; uint8 where the file's type is one that torch does not compute with.
        shape: The shape; that of the bytes where the type is not known.
        label: The element type as it is called in messages.
        loader: Reads the whole tensor where its elements do not lie in order in the file, else None.
        damage: Holds its bytes against their digest, and says in words that they do not match; None without a digest.
    """

    file: FileIO
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    label: str
    loader: Callable[[], Tensor] | None = None
    damage: Callable[[], str] | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the bytes from ``start`` on.

        Raises:
            StateFileError: The file has become shorter since its header was read.
        """
        self.file.seek(self.offset + start)
        filled = 0
        while filled < len(buffer):
            count = self.file.readinto(buffer[filled:])
            if not count:
                raise StateFileError(f"{self.file.name}: ended while it was read; is it being written?")
            filled += count


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read and check the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        The header, ``__metadata__`` included, and where the tensors' bytes begin.

    Raises:
        StateFileError: The file is not a whole safetensors file.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise StateFileError(f"{path}: not a safetensors file, or cut off: its header claims {length:,} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{path}: its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise StateFileError(f"{path}: its header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands in it twice")
    return members


def stored_tensors(path: Path, stack: ExitStack) -> tuple[dict[str, StoredTensor], Any]:
    """List the tensors of a safetensors file, anybody's.

    Args:
        path: The file.
        stack: What closes the file at the end.

    Returns:
        The tensors by stored name, in the order of their bytes, and the header's ``__metadata__``; None without.

    Raises:
        StateFileError: The file is not a whole safetensors file.
        OSError: It cannot be read.
    """
    header, begin = read_header(path)
    file = stack.enter_context(FileIO(path))
    size = os.fstat(file.fileno()).st_size - begin
    found: dict[str, StoredTensor] = {}
    end = 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, entry in sorted(_checked(path, entries), key=lambda pair: pair[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        code = entry["dtype"]
        dtype = FROM_FILE.get(code)
        label = DTYPE_NAMES[dtype] if dtype else code
        if dtype is None or code in _PACKED:
            tensor = StoredTensor(file, begin + first, torch.uint8, (last - first,), label)
        else:
            tensor = StoredTensor(file, begin + first, dtype, tuple(entry["shape"]), label)
            if tensor.nbytes != last - first:
                raise StateFileError(
                    f"{path}: {name!r} claims shape {entry['shape']} of {code} in {last - first:,} bytes"
                )
        if first != end or last > size:
            raise StateFileError(f"{path}: the bytes of {name!r} do not lie where they must")
        end = last
        found[name] = tensor
    if end != size:
        raise StateFileError(f"{path}: {size - end:,} bytes behind the last tensor")
    return found, header.get("__metadata__")


def _checked(path: Path, entries: list[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries that are formed as they must; the first other one is an error."""
    for name, entry in entries:
        well_formed = (
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and _is_sizes(entry.get("shape"))
            and _is_sizes(entry.get("data_offsets"))
            and len(entry["data_offsets"]) == 2
            and entry["data_offsets"][0] <= entry["data_offsets"][1]
        )
        if not well_formed:
            raise StateFileError(f"{path}: the header's entry of {name!r} is malformed")
        yield name, entry


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def whole_file(path: Path, stack: ExitStack) -> StoredTensor:
    """Take the bytes of a whole file as one tensor.

    Args:
        path: The file.
        stack: What closes the file at the end.
    """
    file = stack.enter_context(FileIO(path))
    return StoredTensor(file, 0, torch.uint8, (os.fstat(file.fileno()).st_size,), "bytes")
