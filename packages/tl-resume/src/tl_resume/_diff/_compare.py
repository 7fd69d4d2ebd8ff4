"""The comparison of two states."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from tl_core import TrainingSetup
from tl_resume._diff._lines import counted
from tl_resume._diff._named_sections import named_after, with_names
from tl_resume._diff._open import open_source
from tl_resume._diff._pairs import paired
from tl_resume._diff._report import Difference, Entry, StateDiff, Unreadable
from tl_resume._diff._sections import Label, Section, label
from tl_resume._diff._sources import Source
from tl_resume._diff._stored import StoredTensor
from tl_resume._diff._tensors import Comparer
from tl_resume._diff._tree import Flat, Path, TensorLeaf, flatten
from tl_resume._diff._values import compare_plain, shown

State = Mapping[str, Any] | TrainingSetup | str | os.PathLike[str]

# Damaged tensors that are named in notes.
_MAX_DAMAGES = 5


def diff_states(a: State, b: State, *, rtol: float = 0.0, atol: float = 0.0) -> StateDiff:
    """Compare two training states, wherever they are, and say what differs and where.

    Nothing is unpickled. A tensor is in memory only while it is compared; equal files cost one pass over their bytes.
    Values are compared, not bits: NaN equals NaN at the same place, and -0.0 equals 0.0. The bytes of files are read
    even where they carry digests, which say nothing about what became of the bytes later; a tensor that differs is then
    held against its digest, so that damage is not taken for a difference. Optimizer state that goes by index is named
    after the parameters where their order, number and shapes establish it.

    Example:
        >>> import torch
        >>> from tl_resume import diff_states
        >>> before = {"weight": torch.zeros(2, 2)}
        >>> diff_states(before, {"weight": torch.eye(2)}).differences[0].num_different
        2

    Args:
        a: A state that ``training_state`` captured, any other nested dict of tensors and plain values, a live
            ``TrainingSetup``, or a path: of a ``.safetensors`` file of any origin, of a file of ``torch.save``, of the
            index file of a sharded model, or of a folder such as a Hugging Face Trainer's checkpoint.
        b: The other one, of the same kind or another.
        rtol: Relative tolerance of floats, default 0.
        atol: Absolute tolerance: elements differ beyond ``atol + rtol * abs(b)``, default 0.

    Returns:
        The differences. What only differs within the tolerance is counted, not listed. Files whose content the safe
        reader refuses are listed, and compared byte for byte.

    Raises:
        TypeError: A side is none of these.
        ValueError: A tolerance is negative or no number.
        StateFileError: A file is damaged, or of a kind that cannot be read.
        OSError: A file cannot be opened.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got a {type(value).__name__}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    with ExitStack() as stack:
        first = open_source(a, "a", stack)
        second = open_source(b, "b", stack)
        if isinstance(a, TrainingSetup) and isinstance(b, TrainingSetup):
            first.label, second.label = "setup a", "setup b"
        return _Run(Comparer(rtol, atol), rtol, atol).compare(first, second)


@dataclass
class _Run:
    """One comparison under way: its parts gather here."""

    comparer: Comparer
    rtol: float
    atol: float
    differences: list[Difference] = field(default_factory=list)
    only: tuple[list[Entry], list[Entry]] = field(default_factory=lambda: ([], []))
    unreadable: list[Unreadable] = field(default_factory=list)
    names: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = field(default_factory=dict)
    num_tensors: int = 0
    num_values: int = 0
    num_within: int = 0
    damages: list[str] = field(default_factory=list)

    def compare(self, a: Source, b: Source) -> StateDiff:
        self._refused(a, b)
        if "" not in a.refused and "" not in b.refused:
            for x, y in paired(a, b):
                x, y = x and with_names(x, a), y and with_names(y, b)
                self._section(x and named_after(x, y), y and named_after(y, x))
        return StateDiff(
            a.label,
            b.label,
            self.num_tensors,
            self.num_values,
            tuple(self.differences),
            tuple(self.only[0]),
            tuple(self.only[1]),
            tuple(self.unreadable),
            self.num_within,
            self.rtol,
            self.atol,
            tuple(dict.fromkeys([*self._damage_notes(), *a.notes, *b.notes])),
            self.names,
        )

    def _refused(self, a: Source, b: Source) -> None:
        """List what was not read; what both sides hold is compared by its bytes."""
        for file in dict.fromkeys([*a.refused, *b.refused]):
            x, y = a.raw.get(file), b.raw.get(file)
            if x is None or y is None:
                side, source, other = (0, a, b) if y is None else (1, b, a)
                self.unreadable.append(Unreadable("ab"[side], file or source.label, source.refused[file]))
                if file and all(section.file != file for section in other.sections):
                    self.only[side].append(Entry(file, "", "a file that is not read"))
                continue
            same = x.shape == y.shape and not self.comparer.compare(x, y).num_different
            if file or a.label == b.label:
                reasons = dict.fromkeys([a.refused[file], b.refused[file]])
                self.unreadable.append(Unreadable("both", file or a.label, "; ".join(reasons), same))
            else:
                self.unreadable.append(Unreadable("a", a.label, a.refused[file], same))
                self.unreadable.append(Unreadable("b", b.label, b.refused[file], same))
            if not same:
                self.differences.append(Difference(file, "", "bytes"))

    def _section(self, a: Section | None, b: Section | None) -> None:
        title, kind = _title(a, b), (a or b or Section("", "", {})).kind
        flat_a, flat_b = (flatten(side.value) if side else Flat() for side in (a, b))
        labels = {path: label(path, kind) for path in dict.fromkeys([*flat_a.leaves, *flat_b.leaves])}
        self.names[title] = tuple(dict.fromkeys((named.prefix, named.parts) for named in labels.values()))
        hidden: set[Path] = set()
        for path in _clashes(flat_a, flat_b):
            hidden.add(path)
            named = label(path, kind)
            texts = _described(flat_a, path), _described(flat_b, path)
            self.differences.append(_difference(title, named, "type", *texts))
        for path in flat_a.leaves:
            if not _below(path, hidden):
                if path in flat_b.leaves:
                    self._leaf(title, labels[path], flat_a.leaves[path], flat_b.leaves[path])
                elif path not in flat_b.containers:
                    self.only[0].append(_entry(title, labels[path], _described(flat_a, path)))
        for path in flat_b.leaves:
            if path not in flat_a.leaves and path not in flat_a.containers and not _below(path, hidden):
                self.only[1].append(_entry(title, labels[path], _described(flat_b, path)))
        for side, (one, other) in enumerate(((flat_a, flat_b), (flat_b, flat_a))):
            for path in one.empty:
                if not (path in other.containers or path in other.leaves or _below(path, hidden)):
                    self.only[side].append(_entry(title, label(path, kind), _described(one, path)))

    def _leaf(self, title: str, named: Label, a: Any, b: Any) -> None:
        if isinstance(a, TensorLeaf) and isinstance(b, TensorLeaf):
            self.num_tensors += 1
            self._tensors(title, named, a, b)
            return
        self.num_values += 1
        if isinstance(a, TensorLeaf) or isinstance(b, TensorLeaf):
            texts = (str(side) if isinstance(side, TensorLeaf) else shown(side) for side in (a, b))
            self.differences.append(_difference(title, named, "type", *texts))
            return
        outcome = compare_plain(a, b, self.rtol, self.atol)
        if outcome == "within":
            self.num_within += 1
        elif outcome == "value":
            self.differences.append(_difference(title, named, "plain", a, b))
        elif outcome == "type":
            texts = (f"{type(side).__name__} {shown(side)}" for side in (a, b))
            self.differences.append(_difference(title, named, "type", *texts))

    def _tensors(self, title: str, named: Label, a: TensorLeaf, b: TensorLeaf) -> None:
        if a.shape != b.shape:
            self.differences.append(_difference(title, named, "shape", a.shape, b.shape))
            return
        figures = self.comparer.compare(a.data, b.data)
        numbers = {name: value for name, value in asdict(figures).items() if name != "num_within"}
        if a.label != b.label or figures.num_different:
            numbers["damaged"] = self._damaged(a, b)
        if a.label != b.label:
            self.differences.append(_difference(title, named, "dtype", a.label, b.label, **numbers))
        elif figures.num_different:
            self.differences.append(_difference(title, named, "value", **numbers))
        elif figures.num_within:
            self.num_within += 1

    def _damaged(self, *leaves: TensorLeaf) -> tuple[str, ...]:
        """Name the sides whose file has other bytes than were written."""
        sides = []
        for side, leaf in zip("ab", leaves, strict=True):
            damage = leaf.data.damage() if isinstance(leaf.data, StoredTensor) and leaf.data.damage else ""
            if damage:
                sides.append(side)
                self.damages.append(damage)
        return tuple(sides)

    def _damage_notes(self) -> list[str]:
        found = list(dict.fromkeys(self.damages))
        more = len(found) - _MAX_DAMAGES
        if more <= 0:
            return found
        rest = f"{counted(more, 'more tensor')} {'is' if more == 1 else 'are'} damaged: tl-resume verify names all"
        return [*found[:_MAX_DAMAGES], rest]


def _difference(title: str, named: Label, kind: str, a: Any = None, b: Any = None, **numbers: Any) -> Difference:
    return Difference(title, named.text, kind, a, b, prefix=named.prefix, parts=named.parts, **numbers)


def _entry(title: str, named: Label, what: str) -> Entry:
    return Entry(title, named.text, what, named.prefix, named.parts)


def _clashes(a: Flat, b: Flat) -> Iterator[Path]:
    """Yield the places where the sides hold containers of different kinds, or a container and a leaf."""
    for path, kind in a.containers.items():
        if path in b.leaves or b.containers.get(path, kind) != kind:
            yield path
    yield from (path for path in b.containers if path in a.leaves)


def _described(flat: Flat, path: Path) -> str:
    if path not in flat.containers:
        leaf = flat.leaves[path]
        return str(leaf) if isinstance(leaf, TensorLeaf) else shown(leaf)
    return f"empty {flat.containers[path]}" if path in flat.empty else flat.containers[path]


def _below(path: Path, hidden: set[Path]) -> bool:
    """Say whether a place is one of those, or below it: what is told there already is not told again."""
    return bool(hidden) and any(path[:length] in hidden for length in range(len(path) + 1))


def _title(a: Section | None, b: Section | None) -> str:
    titles = dict.fromkeys(section.title for section in (a, b) if section is not None and section.title)
    return " / ".join(titles)
