"""Lines of text whose stretches know what they are, so that the same lines are plain text or coloured."""

from __future__ import annotations

from collections.abc import Sequence

# A stretch of text and its role: "" (plain), "good", "bad", "title", "head", "name", "figure" or "faint".
Line = list[tuple[str, str]]
# Lines that belong to a row stand below its name, unless one of the table would then be longer than a terminal is wide.
WIDTH = 80
SHALLOW = 6


def text_of(lines: Sequence[Line]) -> str:
    """Return lines as plain text."""
    return "\n".join("".join(clean(text) for text, _ in line).rstrip() for line in lines)


def clean(text: str) -> str:
    """Escape what is not printable: a name in a file may hold anything, also what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def table(headers: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[str]]], aligned: str) -> list[Line]:
    """Lay out rows of cells; the last column is not padded, so that long names break no line.

    Args:
        headers: The titles of the columns.
        rows: The cells of each row, and the lines that belong below its last cell.
        aligned: For each column but the last ``"l"`` or ``"r"``.
    """
    grid = [headers, *(cells for cells, _ in rows)]
    widths = [max(len(cells[column]) for cells in grid) for column in range(len(aligned))]
    depth = sum(widths) + 2 * len(widths) + 4
    if any(depth + len(detail) > WIDTH for _, details in rows for detail in details):
        depth = SHALLOW
    lines: list[Line] = []
    for position, cells in enumerate(grid):
        padded = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, aligned, strict=False)
        ]
        start = "".join(f"{cell}  " for cell in padded)
        roles = ("head", "head") if not position else ("figure", "name")
        lines.append([(f"  {start}", roles[0]), (cells[-1], roles[1])])
        if position:
            lines += [[(" " * depth, ""), (detail, "faint")] for detail in rows[position - 1][1]]
    return lines


def counted(count: int, noun: str) -> str:
    """Write a number of things."""
    plural = noun if count == 1 else f"{noun[:-1]}ies" if noun.endswith("entry") else f"{noun}s"
    return f"{count:,} {plural}"
