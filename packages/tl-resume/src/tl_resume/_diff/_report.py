"""What a comparison found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tl_resume._diff import _text
from tl_resume._diff._lines import text_of
from tl_resume._diff._values import jsonable


@dataclass(frozen=True)
class Entry:
    """Name something that stands in one state only.

    Attributes:
        section: The part of the state: ``"model"``, ``"optimizer 'optimizer'"``, a file of a folder; may be empty.
        name: Its name in the section; empty where it is the whole section.
        what: What it is: type and shape of a tensor, a plain value's text.
    """

    section: str
    name: str
    what: str
    prefix: str = field(default="", repr=False, compare=False)
    parts: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def path(self) -> str:
        """Section and name in one."""
        return joined(self.section, self.name)

    def __str__(self) -> str:
        return f"{self.path} ({self.what})"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"path": self.path, "section": self.section, "name": self.name, "what": self.what}


@dataclass(frozen=True)
class Difference:
    """Say how one tensor or value differs.

    Attributes:
        section: The part of the state: ``"model"``, ``"optimizer 'optimizer'"``, a file of a folder; may be empty.
        name: Its name in the section: ``"encoder.weight"``, ``"exp_avg of encoder.weight"``, ``"last_epoch"``.
        kind: ``"value"`` (elements of a tensor), ``"dtype"``, ``"shape"``, ``"plain"`` (a plain value), ``"type"``
            (of a plain value or container) or ``"bytes"`` (of a file whose content is not read).
        a: The dtype, shape or plain value of the first state; None for the kinds ``"value"`` and ``"bytes"``.
        b: That of the second.
        num_elements: Elements of the tensor; 0 for what is no tensor, or of another shape.
        num_different: How many of them differ beyond the tolerance.
        max_abs: The largest absolute difference among them; None where there is none, or NaN on one side only.
        index: Where that is.
        values: Both values there.
        max_rel: The largest difference relative to the second value, over elements where that is finite and not 0.
        nan_a: Elements that are NaN in the first tensor only.
        nan_b: Elements that are NaN in the second tensor only.
        damaged: The sides, ``"a"`` or ``"b"``, whose file has other bytes there than were written: damage, by the
            digest that a state file of tl-resume carries, and no difference of the states. A note names the file.
    """

    section: str
    name: str
    kind: str
    a: Any = None
    b: Any = None
    num_elements: int = 0
    num_different: int = 0
    max_abs: float | None = None
    index: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    max_rel: float | None = None
    nan_a: int = 0
    nan_b: int = 0
    damaged: tuple[str, ...] = ()
    prefix: str = field(default="", repr=False, compare=False)
    parts: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def path(self) -> str:
        """Section and name in one."""
        return joined(self.section, self.name)

    def __str__(self) -> str:
        return f"{self.path}: {_text.outcome([self])}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data; infinite numbers and NaN as texts, other values by their ``repr``."""
        names = ("section", "name", "kind", "a", "b", "num_elements", "num_different", "max_abs", "index", "values")
        plain = {name: jsonable(getattr(self, name)) for name in (*names, "max_rel", "nan_a", "nan_b", "damaged")}
        return {"path": self.path, **plain}


@dataclass(frozen=True)
class Unreadable:
    """Name a file whose content was not read.

    Attributes:
        side: ``"a"``, ``"b"``, or ``"both"`` where both sides hold it.
        file: Its name.
        reason: Why it was not read.
        same_bytes: True where both sides hold it, byte for byte: then nothing is left open.
    """

    side: str
    file: str
    reason: str
    same_bytes: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"side": self.side, "file": self.file, "reason": self.reason, "same_bytes": self.same_bytes}


@dataclass(frozen=True)
class StateDiff:
    """Say how two states differ.

    Attributes:
        a: What the first state is called in the text.
        b: What the second one is called.
        num_tensors: Tensors that stand in both and were compared.
        num_values: Plain values that stand in both and were compared.
        differences: What stands in both and differs.
        only_in_a: What stands in the first state only.
        only_in_b: What stands in the second state only.
        unreadable: Files that were not read, with the reason.
        num_within_tolerance: Tensors and values that differ, but only within the tolerance.
        rtol: The relative tolerance that was used.
        atol: The absolute tolerance that was used.
        notes: What else is worth knowing about how the states were read.
    """

    a: str
    b: str
    num_tensors: int
    num_values: int
    differences: tuple[Difference, ...]
    only_in_a: tuple[Entry, ...]
    only_in_b: tuple[Entry, ...]
    unreadable: tuple[Unreadable, ...] = ()
    num_within_tolerance: int = 0
    rtol: float = 0.0
    atol: float = 0.0
    notes: tuple[str, ...] = ()
    names: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def same(self) -> bool:
        """Whether nothing differs beyond the tolerance, and nothing that could differ was left unread."""
        return self.judged and not (self.differences or self.only_in_a or self.only_in_b)

    @property
    def judged(self) -> bool:
        """Whether every file was read, or compared byte for byte."""
        return all(item.same_bytes or item.side == "both" for item in self.unreadable)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole result as plain data that strict JSON holds."""
        return {
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "num_tensors": self.num_tensors,
            "num_values": self.num_values,
            "num_within_tolerance": self.num_within_tolerance,
            "rtol": self.rtol,
            "atol": self.atol,
            "differences": [difference.as_dict() for difference in self.differences],
            "only_in_a": [entry.as_dict() for entry in self.only_in_a],
            "only_in_b": [entry.as_dict() for entry in self.only_in_b],
            "unreadable": [item.as_dict() for item in self.unreadable],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return text_of(_text.lines(self))


def joined(section: str, name: str) -> str:
    """Write section and name in one."""
    if not section or name.startswith("setup."):
        return name or "state"
    return f"{section}: {name}" if name else section


for _public in (Entry, Difference, Unreadable, StateDiff):
    _public.__module__ = "tl_resume"
