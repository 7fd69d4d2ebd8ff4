"""The folder that holds the checkpoint: what is in it, and putting it back as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Describe one file or link.

    Args:
        inode: Its number; a file that is renamed keeps it.
        size_bytes: Its size.
        changed_ns: When its data changed last, in nanoseconds.
        target: What it points to, for a symbolic link.
    """

    inode: int
    size_bytes: int
    changed_ns: int
    target: str | None = None


Tree = dict[str, Entry]  # by path below the folder


def read_tree(folder: str) -> Tree:
    """List the files and links below a folder."""
    return dict(_entries(folder, ""))


def _entries(folder: str, below: str) -> Iterator[tuple[str, Entry]]:
    try:
        members = sorted(os.scandir(os.path.join(folder, below)), key=lambda member: member.name)
    except FileNotFoundError:  # removed meanwhile
        return
    for member in members:
        name = os.path.join(below, member.name)
        if member.is_dir(follow_symlinks=False):
            yield from _entries(folder, name)
            continue
        try:
            found = member.stat(follow_symlinks=False)
            target = os.readlink(member.path) if member.is_symlink() else None
        except FileNotFoundError:
            continue
        yield name, Entry(found.st_ino, found.st_size, found.st_mtime_ns, target)


def changed(before: Tree, after: Tree) -> list[str]:
    """The paths of ``after`` that are new or whose content is not that of ``before``."""
    return [name for name, entry in after.items() if before.get(name) != entry]


def folders(root: str) -> set[str]:
    """The paths of all folders below a folder."""
    found = set()
    for parent, names, _ in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                found.add(os.path.relpath(path, root))
    return found


def restore(work: str, good: str, untouched: Tree) -> Tree:
    """Make a folder what it was, copying back only what is not.

    Args:
        work: The folder.
        good: A copy of what it was.
        untouched: ``read_tree(work)`` when it was so.

    Returns:
        ``read_tree(work)``, in which what was copied back has new inodes.
    """
    wanted = folders(good)
    for name in sorted(folders(work) - wanted):
        shutil.rmtree(os.path.join(work, name), ignore_errors=True)
    now = read_tree(work)
    for name, entry in now.items():
        if untouched.get(name) != entry:
            os.remove(os.path.join(work, name))
    for name in sorted(wanted):
        os.makedirs(os.path.join(work, name), exist_ok=True)
    for name, entry in untouched.items():
        if now.get(name) != entry:
            shutil.copy2(os.path.join(good, name), os.path.join(work, name), follow_symlinks=False)
    return read_tree(work)
