"""The points at which a save is made to die, chosen from what an undisturbed one did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from tl_resume._crash._tree import Tree
from tl_resume._crash._watch import OPENS, Act

T = TypeVar("T")

_MAX_FILES = 6
_MAX_ACTS = 10
_INSIDE = {1: 4, 2: 3, 3: 3}  # points in each file, by the number of files; 2 in each of more than 3


@dataclass(frozen=True)
class Written:
    """Describe one file that the save wrote.

    Args:
        name: Its path below the folder while it was written.
        size_bytes: Its size in the end.
        after: The index of the act after which it was written; -1 for none.
        in_place: It is a file that was there before.
        begin: How many bytes it had, when it was opened to append to it.
    """

    name: str
    size_bytes: int
    after: int
    in_place: bool
    begin: int = 0


@dataclass(frozen=True)
class Point:
    """Describe one way in which the save ends.

    Args:
        kind: ``"byte"`` (killed when a file has so many bytes), ``"act"`` (killed before an act) or ``"full-disk"``;
            where a writer claims a file's size at once, ``"growth"`` (killed when so much is filled) or ``"unfilled"``
            (killed when it is whole, the rest then zeroed) instead of ``"byte"``.
        index: The act: the limit begins at it, or the save is killed before it.
        written: The file, for points inside of one.
        num_bytes: At how many bytes of it.
        act: The act, for points before one.
    """

    kind: str
    index: int
    written: Written | None = None
    num_bytes: int = 0
    act: Act | None = None


def written_files(acts: list[Act], before: Tree, trees: list[Tree], after: Tree) -> list[Written]:
    """The files that a save wrote, in order.

    Args:
        acts: What it did to files.
        before: The folder's tree at the start.
        trees: Its tree before each act.
        after: Its tree in the end.
    """
    sequence = [before, *trees, after]
    files: list[Written] = []
    for gap, (earlier_tree, now) in enumerate(pairwise(sequence)):
        done = acts[:gap]
        known = {entry.inode: entry for entry in earlier_tree.values()}
        for name, entry in now.items():
            if entry.target is not None:  # a link is made at once
                continue
            earlier = known.get(entry.inode)
            if earlier is not None and (earlier.size_bytes, earlier.changed_ns) == (entry.size_bytes, entry.changed_ns):
                continue
            same_file = earlier_tree.get(name)
            in_place = same_file is not None and same_file.inode == entry.inode and ("remove", name, "") not in done
            if in_place and any(file.name == name for file in files):  # it was being written already
                files = [_grown(file, entry.size_bytes) if file.name == name else file for file in files]
            else:
                opened = [i for i, act in enumerate(done) if act[0] in OPENS and act[1] == name]
                start = opened[-1] if opened else len(done) - 1
                appended = in_place and same_file is not None and bool(opened) and done[start][0] == "append"
                begin = same_file.size_bytes if appended and same_file is not None else 0
                files.append(Written(name, entry.size_bytes, start, in_place, begin))
    return files


def _grown(file: Written, size_bytes: int) -> Written:
    return replace(file, size_bytes=max(file.size_bytes, size_bytes))


def choose_points(files: list[Written], acts: list[Act], crash_points: int | None) -> tuple[list[Point], list[str]]:
    """Choose the points: inside of files, before acts, and with a full disk.

    Args:
        files: What the save wrote.
        acts: What it did, in order.
        crash_points: How many points inside of each file; None for a few.

    Returns:
        The points, and in words what was left out.
    """
    left_out = []
    filled = [file for file in files if file.size_bytes > file.begin]
    chosen = _spread(filled, _MAX_FILES if crash_points is None else len(filled))
    if len(chosen) < len(filled):
        left_out.append(f"{len(filled) - len(chosen)} of the {len(filled)} files of save()")
    each = crash_points if crash_points is not None else _INSIDE.get(len(chosen), 2)
    points = [
        Point("byte", file.after, file, num_bytes)
        for file in chosen
        for num_bytes in _bytes(file.begin, file.size_bytes, each)
    ]
    telling = [(index, act) for index, act in enumerate(acts) if act[0] not in OPENS]
    kept = _spread(telling, _MAX_ACTS if crash_points is None else len(telling))
    if len(kept) < len(telling):
        left_out.append(f"{len(telling) - len(kept)} of the {len(telling)} renames, removals and links of save()")
    points += [Point("act", index, act=act) for index, act in kept]
    full = [Point("full-disk", file.after, file, (file.begin + file.size_bytes) // 2) for file in _spread(chosen, 3)]
    return points + full, left_out


def _bytes(begin: int, size_bytes: int, number: int) -> list[int]:
    """The first byte, the last one, and some between them."""
    last = size_bytes - 1
    return sorted({begin + (last - begin) * index // max(number - 1, 1) for index in range(number)})


def _spread(items: list[T], number: int) -> list[T]:
    if len(items) <= number:
        return items
    return [items[index * (len(items) - 1) // (number - 1)] for index in range(number)]
