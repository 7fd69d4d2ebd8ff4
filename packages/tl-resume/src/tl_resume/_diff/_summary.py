"""What is in a state: its sections, tensors and values, for ``tl-resume show``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tl_resume._diff._groups import group_name
from tl_resume._diff._lines import Line, counted, table
from tl_resume._diff._named_sections import named_after, with_names
from tl_resume._diff._open import open_path
from tl_resume._diff._sections import Label, label
from tl_resume._diff._tree import TensorLeaf, flatten
from tl_resume._diff._values import jsonable, shown, size

# Tensors of a section are shown one by one up to this many, else by module.
MAX_ROWS = 12


@dataclass(frozen=True)
class TensorRow:
    """A tensor, or the tensors of a module: dtypes, shapes, bytes and a name."""

    dtype: str
    shape: str
    num_bytes: int
    name: str


@dataclass
class Part:
    """One section of a state."""

    title: str
    kind: str
    tensors: list[tuple[Label, TensorLeaf]] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(leaf.nbytes for _, leaf in self.tensors)


@dataclass
class Summary:
    """What a file or folder holds."""

    path: str
    form: str
    version: int | None
    file_bytes: int
    stored_bytes: int | None
    parts: list[Part]
    refused: dict[str, str]
    notes: list[str]

    @property
    def num_tensors(self) -> int:
        """How many tensors it holds."""
        return sum(len(part.tensors) for part in self.parts)

    @property
    def num_values(self) -> int:
        """How many plain values it holds."""
        return sum(len(part.values) for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(part.num_bytes for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data that strict JSON holds."""
        return {
            "path": self.path,
            "form": self.form,
            "version": self.version,
            "file_bytes": self.file_bytes,
            "num_tensors": self.num_tensors,
            "num_values": self.num_values,
            "tensor_bytes": self.num_bytes,
            "stored_bytes": self.stored_bytes,
            "sections": [
                {
                    "section": part.title,
                    "tensors": [
                        {"name": named.text, "dtype": leaf.label, "shape": list(leaf.shape), "bytes": leaf.nbytes}
                        for named, leaf in part.tensors
                    ],
                    "values": [{"name": name, "value": jsonable(value)} for name, value in part.values],
                }
                for part in self.parts
            ],
            "unreadable": [{"file": file or self.path, "reason": reason} for file, reason in self.refused.items()],
            "notes": self.notes,
        }


def summarise(path: Path) -> Summary:
    """Say what a file or folder holds, without reading its tensors.

    Raises:
        StateFileError: It is damaged, or of a kind that cannot be read.
        OSError: It cannot be opened.
    """
    with ExitStack() as stack:
        source = open_path(path, stack)
        parts = []
        for given in source.sections:
            section = named_after(with_names(given, source), None)
            part = Part(section.title, section.kind)
            flat = flatten(section.value)
            for place, leaf in flat.leaves.items():
                named = label(place, section.kind)
                if isinstance(leaf, TensorLeaf):
                    part.tensors.append((named, leaf))
                else:
                    part.values.append((named.text, leaf))
            for place in sorted(flat.empty, key=repr):
                part.values.append((label(place, section.kind).text, [] if flat.containers[place] == "list" else {}))
            parts.append(part)
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        stored, refused = source.stored_bytes, source.refused
        return Summary(str(path), source.form, source.version, size, stored, parts, refused, source.notes)


def _tensor_rows(part: Part, *, everything: bool) -> list[TensorRow]:
    """Arrange the tensors of a section: one by one where they are few, else by module.

    An optimizer's are one row for each kind of state.

    Args:
        part: The section.
        everything: One by one, however many.
    """
    if everything or len(part.tensors) <= MAX_ROWS:
        return [_row([(named, leaf)], named.text or "content") for named, leaf in part.tensors]
    chosen = _by_module(part, 0)
    slots = any(named.prefix for named, _ in part.tensors)
    deepest = 0 if slots else max(len(named.parts) for named, _ in part.tensors)
    for depth in range(1, deepest):
        finer = _by_module(part, depth)
        if len(finer) > MAX_ROWS:
            break
        chosen = finer
    return [_row(members, name) for name, members in chosen.items()]


def _by_module(part: Part, depth: int) -> dict[str, list[tuple[Label, TensorLeaf]]]:
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[Label, TensorLeaf]]] = {}
    for named, leaf in part.tensors:
        groups.setdefault((named.prefix, named.parts[:depth]), []).append((named, leaf))
    texts: dict[str, list[tuple[Label, TensorLeaf]]] = {}
    for (prefix, parts), members in groups.items():
        text = members[0][0].text if len(members) == 1 else group_name(prefix, parts, len(members), "tensor")
        texts[text] = members
    return texts


def _row(members: list[tuple[Label, TensorLeaf]], name: str) -> TensorRow:
    dtypes = list(dict.fromkeys(leaf.label for _, leaf in members))
    shapes = list(dict.fromkeys(leaf.shape for _, leaf in members))
    return TensorRow(
        ", ".join(dtypes[:2]) + (", ..." if len(dtypes) > 2 else ""),
        str(list(shapes[0])) if len(shapes) == 1 else f"{len(shapes)} shapes",
        sum(leaf.nbytes for _, leaf in members),
        name,
    )


def lines(summary: Summary, *, everything: bool = False) -> list[Line]:
    """Write what a file or folder holds.

    Args:
        summary: What it holds.
        everything: Every tensor and value, none grouped and none left out.
    """
    form = summary.form if summary.version is None else f"{summary.form}, format version {summary.version}"
    extent = f" of {size(summary.num_bytes)}" if summary.num_tensors else ""
    if summary.stored_bytes not in (None, summary.num_bytes):  # tied tensors, and views, are stored once
        extent += f" ({size(summary.stored_bytes or 0)} stored)"
    what = f"{counted(summary.num_tensors, 'tensor')}{extent}, {counted(summary.num_values, 'plain value')}"
    whose = "files" if summary.form == "a folder" else "file"
    written: list[Line] = [
        [(summary.path, "title"), (f": {form}", "")],
        [(f"  {what}, {whose} of {size(summary.file_bytes)}", "faint")],
        *([(f"  note: {note}", "faint")] for note in summary.notes),
    ]
    for part in summary.parts:
        title = part.title or ("tensors" if part.tensors else "values")
        extent = f"  {counted(len(part.tensors), 'tensor')}, {size(part.num_bytes)}" if part.tensors else ""
        written += [[], [(title, "title"), (extent, "faint")]]
        if part.tensors:
            rows = _tensor_rows(part, everything=everything)
            cells = [((row.dtype, row.shape, size(row.num_bytes), row.name), ()) for row in rows]
            written += table(("dtype", "shape", "size", "tensor"), cells, "llr")
        limit = len(part.values) if everything else MAX_ROWS
        written += [
            [(f"  {name or 'content'}", "name"), (f": {shown(value)}", "")] for name, value in part.values[:limit]
        ]
        if part.values[limit:]:
            written.append([(f"  ... and {counted(len(part.values) - limit, 'more value')}", "faint")])
    if summary.refused:
        written += [[], [("not read", "title")]]
        for file, reason in summary.refused.items():
            written += [[(f"  {file or summary.path}", "name")], [(f"    {reason}", "")]]
    return written
