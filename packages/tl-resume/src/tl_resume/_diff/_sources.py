"""What can be compared: states in memory, live setups, files and folders, opened without reading the tensors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tl_core import TrainingSetup
from tl_resume._diff._sections import Section, split
from tl_resume._diff._stored import StoredTensor, read_header, stored_tensors, whole_file
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
        from tl_resume._state import training_state

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
        from tl_resume._diff._folders import open_folder

        return open_folder(path, stack)
    if not path.is_file() and path.exists():
        raise StateFileError(f"{path}: neither a file nor a folder")
    with path.open("rb") as file:
        start = file.read(9)
    if _is_torch(start):
        return _open_torch(path, stack)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return open_safetensors(path, stack)
    if path.suffix == ".json":
        if path.name.endswith(".index.json"):
            from tl_resume._diff._folders import open_index

            return open_index(path, stack)
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


def open_safetensors(path: Path, stack: ExitStack) -> Source:
    """Open a safetensors file, ours or anybody's.

    Raises:
        StateFileError: It is damaged.
        OSError: It cannot be opened.
    """
    header, _ = read_header(path)
    metadata = header.get("__metadata__")
    tensors = stored_tensors(path, stack)
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
    if type(node) is tuple:
        return tuple(_placed(item, stored) for item in node)
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
