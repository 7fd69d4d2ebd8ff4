"""Folders of a Hugging Face Trainer's checkpoint, or of any checkpoint made of several files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tl_resume._diff._sections import Section
from tl_resume._diff._sources import Source, open_file, read_json
from tl_resume._diff._stored import whole_file
from tl_resume._format import StateFileError

INDEX = ".index.json"
_KINDS = {
    "model.safetensors": "model",
    "pytorch_model.bin": "model",
    "adapter_model.safetensors": "model",
    "optimizer.pt": "optimizer",
    "optimizer.bin": "optimizer",
    "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler",
    "scaler.pt": "scaler",
}
_READ = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")


def open_folder(path: Path, stack: ExitStack) -> Source:
    """Open a folder: the content of each file under its name, that of a sharded model under the name of the whole.

    Raises:
        StateFileError: It is a checkpoint of ``torch.distributed.checkpoint``, it has no files, or a file is damaged.
        OSError: A file cannot be opened.
    """
    files = sorted(file for file in path.iterdir() if file.is_file())
    if (path / ".metadata").exists():
        raise StateFileError(
            f"{path}: a checkpoint of torch.distributed.checkpoint, which is not read here; convert it with "
            f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save and compare the file that this writes"
        )
    if not files:
        raise StateFileError(f"{path}: a folder without files")
    source = Source(str(path), [], "a folder")
    shards: set[str] = set()
    for index in (file for file in files if file.name.endswith(INDEX)):
        section, names = _sharded(index, stack)
        source.sections.append(section)
        shards |= names | {index.name}
    for file in files:
        if file.name not in shards:
            _add(source, file, stack)
    return source


def open_index(path: Path, stack: ExitStack) -> Source:
    """Open a sharded model by its index file.

    Raises:
        StateFileError: The index or a shard is damaged.
        OSError: A shard cannot be opened.
    """
    section, _ = _sharded(path, stack)
    return Source(str(path), [Section("", "model", section.value, section.ordered)], "a sharded model")


def _add(source: Source, file: Path, stack: ExitStack) -> None:
    """Add a file of a folder; one of a kind that is not read is compared by its bytes."""
    if not file.name.endswith(_READ):
        source.sections.append(Section(file.name, "", {"bytes of the file": whole_file(file, stack)}))
        return
    try:
        inner = open_file(file, stack)
    except StateFileError as error:
        inner = Source(file.name, [], "")
        inner.refused[""] = str(error).removeprefix(f"{file}").lstrip(": ")
        inner.raw[""] = whole_file(file, stack)
    if inner.refused:
        source.refused[file.name] = inner.refused[""]
        source.raw[file.name] = inner.raw[""]
        return
    source.notes += inner.notes
    kind = _KINDS.get(file.name, "")
    for section in inner.sections:
        title = f"{file.name}: {section.title}" if section.title else file.name
        source.sections.append(
            Section(title, section.kind or ("" if section.title else kind), section.value, section.ordered)
        )


def _sharded(index: Path, stack: ExitStack) -> tuple[Section, set[str]]:
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise StateFileError(f"{index}: an index without a weight_map of file names")
    files = sorted(set(shards.values()))
    tensors: dict[str, Any] = {}
    for name in files:
        if not _is_shard(name):
            raise StateFileError(f"{index}: names the shard {name!r}, which is not a file beside it")
        shard = open_file(index.parent / name, stack)
        if shard.refused:
            raise StateFileError(f"{index.parent / name}: {shard.refused['']}")
        for section in shard.sections:
            if isinstance(section.value, Mapping) and section.title != "__metadata__":
                tensors.update(section.value)
    missing = sorted(name for name in shards if name not in tensors)
    if missing:
        raise StateFileError(f"{index}: the shards lack {missing[0]!r} and {len(missing) - 1} more of its tensors")
    ordered = all(not name.endswith(".safetensors") for name in files)
    return Section(index.name.removesuffix(INDEX), "model", tensors, ordered), set(files)


def _is_shard(name: str) -> bool:
    """Say whether a name can be that of a file beside the index, and of no index, which might name itself."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return Path(name).name == name and "\0" not in name and not name.endswith(INDEX)
