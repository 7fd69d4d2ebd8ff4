"""A comparison written for people: rows of figures with the name last, so that no name is ever broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tl_resume._diff._groups import grouped
from tl_resume._diff._lines import Line, counted, table
from tl_resume._diff._values import number, number_pair, shown_pair

if TYPE_CHECKING:
    from tl_resume._diff._report import Difference, Entry, StateDiff, Unreadable

# Rows of a section at the most, unless all are asked for.
MAX_ROWS = 12
_HEADERS = ("elements", "largest", "relative", "tensor")
_TENSOR_KINDS = ("value", "dtype", "shape")


@dataclass(frozen=True)
class Row:
    """One row of figures: three cells, the name, and lines that belong below the name."""

    cells: tuple[str, str, str]
    name: str
    details: tuple[str, ...]


@dataclass
class Block:
    """What is said about one section: a title, rows of figures, and lines of name and text."""

    title: str
    rows: list[Row] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)


def _verdict(diff: StateDiff) -> str:
    """Write the outcome in one line."""
    if diff.same:
        files = sum(item.same_bytes for item in diff.unreadable)
        unread = f", {counted(files, 'file')} byte for byte" if files else ""
        return f"same: {counted(diff.num_tensors, 'tensor')}, {counted(diff.num_values, 'plain value')}{unread}"
    if not (diff.differences or diff.only_in_a or diff.only_in_b):
        open_files = sum(not (item.same_bytes or item.side == "both") for item in diff.unreadable)
        return f"could not be judged: {counted(open_files, 'file')} could not be read"
    parts = []
    num_tensors = sum(item.kind in _TENSOR_KINDS for item in diff.differences)
    num_files = sum(item.kind == "bytes" for item in diff.differences)
    num_values = len(diff.differences) - num_tensors - num_files
    if num_tensors:
        parts.append(f"{num_tensors:,} of {counted(diff.num_tensors, 'tensor')}")
    if num_values:
        parts.append(counted(num_values, "plain value"))
    if num_files:
        parts.append(counted(num_files, "file"))
    for side, entries in (("a", diff.only_in_a), ("b", diff.only_in_b)):
        if entries:
            parts.append(f"{len(entries):,} only in {side}")
    return f"different: {', '.join(parts)}"


def _remarks(diff: StateDiff) -> list[str]:
    """Write what belongs below the verdict: what the sides are, and what the tolerance let pass."""
    lines = [f"a: {diff.a}", f"b: {diff.b}"]
    if diff.num_within_tolerance:
        what = f"{diff.num_within_tolerance:,} more" if not diff.same else f"{diff.num_within_tolerance:,} of them"
        verb = "differs" if diff.num_within_tolerance == 1 else "differ"
        lines.append(f"{what} {verb} within rtol {diff.rtol:g}, atol {diff.atol:g}")
    return lines + [f"note: {note}" for note in diff.notes]


def _blocks(diff: StateDiff, *, everything: bool = False) -> list[Block]:
    """Arrange what differs by section.

    Args:
        diff: The comparison.
        everything: A row for each tensor, none grouped and none left out.
    """
    made = []
    for section in dict.fromkeys(item.section for item in diff.differences):
        made.append(_section(section, [item for item in diff.differences if item.section == section], diff, everything))
    for side, only in (("a", diff.only_in_a), ("b", diff.only_in_b)):
        if only:
            made.append(Block(f"only in {side}", lines=_only(only, diff, everything)))
    if diff.unreadable:
        made.append(Block("not read", lines=[line for item in diff.unreadable for line in _unread(item)]))
    return made


def _section(section: str, found: list[Difference], diff: StateDiff, everything: bool) -> Block:
    kinds = {item.kind for item in found}
    block = Block(section or ("tensors" if kinds & {*_TENSOR_KINDS} else "content" if "bytes" in kinds else "values"))
    tensors = [item for item in found if item.kind in _TENSOR_KINDS]
    groups: list[tuple[str, list[Difference]]] = []
    if everything:
        groups = [(item.name, [item]) for item in tensors]
    else:
        for key in dict.fromkeys(map(_likeness, tensors)):
            alike = [item for item in tensors if _likeness(item) == key]
            groups += grouped(alike, diff.names.get(section, ()), "tensor")
    limit = len(groups) if everything else MAX_ROWS
    block.rows = [_row(name, members) for name, members in groups[:limit]]
    rest = [member for _, members in groups[limit:] for member in members]
    if rest:
        block.rows.append(_row(f"... and {counted(len(rest), 'more tensor')}", rest))
    plain = [item for item in found if item.kind not in _TENSOR_KINDS]
    limit = len(plain) if everything else MAX_ROWS
    block.lines = [(item.name or "content" if item.kind != "bytes" else "", outcome([item])) for item in plain[:limit]]
    if plain[limit:]:
        block.lines.append((f"... and {counted(len(plain) - limit, 'more value')}", ""))
    return block


def _likeness(item: Difference) -> Any:
    """Return what differences that are written as one have in common."""
    return (item.kind, item.damaged, *((item.a, item.b) if item.kind == "dtype" else ()))


def _row(name: str, members: Sequence[Difference]) -> Row:
    num_elements = sum(item.num_elements for item in members)
    num_different = sum(item.num_different for item in members)
    measured = [item for item in members if item.max_abs is not None]
    relative = [item.max_rel for item in members if item.max_rel is not None]
    largest = max((item.max_abs for item in measured if item.max_abs is not None), default=None)
    cells = (
        f"{num_different:,} of {num_elements:,}" if num_elements else "-",
        "-" if largest is None else number(largest),
        number(max(relative)) if relative else "-",
    )
    return Row(cells, name or "content", tuple(_details(name, members)))


def _details(name: str, members: Sequence[Difference]) -> list[str]:
    first = members[0]
    lines = []
    if first.kind in ("dtype", "shape") and (first.kind == "dtype" or len(members) == 1):
        lines.append(f"{first.kind} {_kind_text(first.a)} -> {_kind_text(first.b)}")
    elif first.kind == "shape":
        lines.append(f"{first.name}: shape {_kind_text(first.a)} -> {_kind_text(first.b)}")
    measured = [item for item in members if item.max_abs is not None]
    if measured:
        item = max(measured, key=lambda member: member.max_abs or 0.0)
        assert item.values is not None
        assert item.index is not None
        left, right = number_pair(*item.values)
        where = f"[{', '.join(map(str, item.index))}]" if item.index else ""
        own = item.name.removeprefix(first.prefix) if len({member.prefix for member in members}) == 1 else item.name
        lines.append(f"{'' if item.name == name and where else own}{where}: {left} -> {right}".removeprefix(": "))
    nan = sum(item.nan_a for item in members), sum(item.nan_b for item in members)
    if any(nan):
        told = [f"{count:,} in {side} only" for side, count in zip("ab", nan, strict=True) if count]
        lines.append(f"NaN: {', '.join(told)}")
    if damaged := sorted({side for item in members for side in item.damaged}):
        lines.append(f"damaged in {' and '.join(damaged)}")
    return lines


def _kind_text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def outcome(members: Sequence[Difference]) -> str:
    """Write how one tensor or value differs, in one line."""
    item = members[0]
    if item.kind == "plain":
        return shown_pair(item.a, item.b)
    if item.kind == "type":
        return f"{item.a} -> {item.b}"
    if item.kind == "bytes":
        return "the bytes of the file differ, its content is not read"
    row = _row(item.name, members)
    if item.num_different or item.kind == "value":
        largest = f", by up to {row.cells[1]}" if item.max_abs is not None else ""
        return "; ".join([f"{row.cells[0]} elements differ{largest}", *row.details])
    return "; ".join(row.details)


def _only(entries: Sequence[Entry], diff: StateDiff, everything: bool) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for section in dict.fromkeys(entry.section for entry in entries):
        members = [entry for entry in entries if entry.section == section]
        noun = "tensor" if all(entry.what.endswith("]") for entry in members) else "entry"
        names = [] if everything else diff.names.get(section, ())
        if everything:
            groups = [(entry.name, [entry]) for entry in members]
        elif _whole(members, names):
            groups = [(f"all {counted(len(members), noun)}", members)]
        else:
            groups = grouped(members, names, noun)
        limit = len(groups) if everything else MAX_ROWS
        for name, group in groups[:limit]:
            text = group[0].what if len(group) == 1 and group[0].name == name else ""
            own = name.startswith("setup.") or not section
            lines.append((name if own else f"{section}: {name}" if name else section, text))
        rest = sum(len(group) for _, group in groups[limit:])
        if rest:
            lines.append((f"{section}: ".removeprefix(": ") + f"... and {counted(rest, 'more ' + noun)}", ""))
    return lines


def _whole(members: Sequence[Entry], names: Iterable[Any]) -> bool:
    """Say whether these are all that the section has."""
    return len(members) > 1 and {(entry.prefix, entry.parts) for entry in members} == set(names)


def _unread(item: Unreadable) -> list[tuple[str, str]]:
    side = "" if item.side == "both" else f" (in {item.side})"
    lines = [(f"{item.file}{side}", ""), ("", f"  {item.reason}")]
    return [*lines, ("", "  both sides hold the same bytes")] if item.same_bytes else lines


def lines(diff: StateDiff, *, everything: bool = False) -> list[Line]:
    """Write a whole comparison.

    Args:
        diff: The comparison.
        everything: A row for each tensor, none grouped and none left out.
    """
    written: list[Line] = [[(_verdict(diff), "good" if diff.same else "bad")]]
    written += [[(f"  {line}", "faint")] for line in _remarks(diff)]
    for block in _blocks(diff, everything=everything):
        written += [[], [(block.title, "title")]]
        if block.rows:
            written += table(_HEADERS, [((*row.cells, row.name), row.details) for row in block.rows], "rrr")
        for name, text in block.lines:
            written.append([(f"  {name}", "name"), (f": {text}" if name and text else text, "")])
    return written
