"""Files that can be compared, opened without reading the tensors."""

from __future__ import annotations

import functools
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tl_resume._diff._sections import Section, split
from tl_resume._diff._stored import StoredTensor, stored_tensors, whole_file
from tl_resume._diff._torch_files import ZIP_MAGIC, RefusedFileError, load_torch_file
from tl_resume._diff._tree import PACKED, array_label
from tl_resume._format import StateFile, StateFileError, TensorEntry
from tl_resume._format._dtypes import DTYPE_NAMES
from tl_resume._format._entry import contiguous_strides
from tl_resume._format._header import KEY


@dataclass
class Source:
    """An opened state.

    Attributes:
        label: What messages call it.
        sections: Its parts.
        form: What kind of thing it is, for people.
        version: The format version of a file of ours, else None.
        stored_bytes: The size of the tensors that it stores, tied ones once; None for what is no file of ours.
        refused: The reason by file, for files whose content is not read; a single file is named "".
        raw: The bytes of the refused files, by the same names.
        notes: What is worth knowing about how it was read.
    """

    label: str
    sections: list[Section]
    form: str
    version: int | None = None
    stored_bytes: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    raw: dict[str, StoredTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def open_file(path: Path, stack: ExitStack) -> Source:
    """Open a file.

    Raises:
        StateFileError: It is damaged, or of a kind that cannot be read.
        OSError: It cannot be opened.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would wait for somebody to write to it
        raise StateFileError(f"{path}: neither a file nor a folder")
    with path.open("rb") as file:
        start = file.read(9)
    if _is_torch(start):
        return _open_torch(path, stack)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return _open_safetensors(path, stack)
    if path.suffix == ".json":
        return Source(str(path), [Section("", "", read_json(path))], "a JSON file")
    raise StateFileError(f"{path}: neither a safetensors file nor one of torch.save")


def _is_torch(start: bytes) -> bool:
    # torch < 1.6 wrote bare pickles, which begin with their protocol
    return start.startswith(ZIP_MAGIC) or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def _open_torch(path: Path, stack: ExitStack) -> Source:
    try:
        content, note = load_torch_file(path)
    except RefusedFileError as refusal:
        raw = {"": whole_file(path, stack)}
        return Source(str(path), [], "a torch.save file", refused={"": str(refusal)}, raw=raw)
    return Source(str(path), split(content), "a torch.save file", notes=[note] if note else [])


def _open_safetensors(path: Path, stack: ExitStack) -> Source:
    """Open a safetensors file, ours or anybody's."""
    tensors, metadata = stored_tensors(path, stack)
    if isinstance(metadata, dict) and KEY in metadata:
        file = stack.enter_context(StateFile(path))
        damage = functools.cache(functools.partial(_damage, file))  # views have the bytes of one tensor

        def stored(entry: TensorEntry) -> StoredTensor:
            tensor = _tensor(entry, file, tensors[entry.name])
            return replace(tensor, damage=functools.partial(damage, entry.name))

        source = Source(str(path), split(_placed(file.skeleton(), stored)), "a state file", version=file.version)
        source.stored_bytes = sum(entry.nbytes for entry in file.tensors.values())
        return source
    content: dict[str, Any] = dict(tensors)
    sections = split(content, ordered=False)
    if metadata:
        sections.append(Section("__metadata__", "", metadata))
    return Source(str(path), sections, "a safetensors file")


def _placed(node: Any, stored: Callable[[TensorEntry], StoredTensor]) -> Any:
    """Put the stored tensors into the places of a skeleton's entries."""
    if isinstance(node, TensorEntry):
        return stored(node)
    if isinstance(node, Mapping):
        return {key: _placed(item, stored) for key, item in node.items()}
    if isinstance(node, list):
        return [_placed(item, stored) for item in node]
    if isinstance(node, deque) or type(node) is tuple:
        return type(node)(_placed(item, stored) for item in node)
    return node


def _damage(file: StateFile, name: str) -> str:
    if not file.damaged([name]):
        return ""
    return f"the bytes of {name!r} in {file.path} are not those that were written"


def _tensor(entry: TensorEntry, file: StateFile, stored: StoredTensor) -> StoredTensor:
    label = DTYPE_NAMES[entry.dtype]
    if entry.kind == "bytes":
        label = "bytes"
    elif entry.kind == "array":
        order = {"<": "little", ">": "big"}.get(entry.array[0], sys.byteorder)
        size = entry.array[2:]
        plain = entry.array[1] in "biufc" and order == sys.byteorder and size == str(entry.dtype.itemsize)
        label = array_label(entry.array, entry.dtype if plain else None)
    if entry.dtype == PACKED:
        return stored
    base = file.tensors[entry.name]
    if entry.whole or (entry.offset, entry.dtype, entry.shape, entry.strides) == (
        0,
        base.dtype,
        base.shape,
        base.strides,
    ):
        return StoredTensor(stored.file, stored.offset, entry.dtype, entry.shape, label)
    if base.strides == contiguous_strides(base.shape) and entry.strides == contiguous_strides(entry.shape):
        return StoredTensor(stored.file, stored.offset + entry.offset, entry.dtype, entry.shape, label)

    def load() -> torch.Tensor:
        # the elements of a view that lie in another order than in the file
        view: torch.Tensor = file.read(entry, verify=False)
        return view.reshape(-1)

    return StoredTensor(stored.file, stored.offset, entry.dtype, entry.shape, label, load)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        StateFileError: It is no valid JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{path}: not valid JSON ({error})") from None
