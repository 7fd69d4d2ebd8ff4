"""Why a checkpoint is lost, from what a death in the middle of a save has left in the folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from tl_resume._crash._points import Point
from tl_resume._crash._tree import Tree, changed, read_tree
from tl_resume._crash._watch import Act

_MAX_POINTER_BYTES = 4096
_WRITE_ASIDE = (
    "write to a temporary file beside it, flush and os.fsync it, os.replace it over {name} and os.fsync the folder; "
    "or let save_training_state(setup, path) do all that"
)
ONE_FOLDER = (
    "write all files of a save into a new folder, os.fsync them, and only then make that folder the current one with a "
    "single rename; or write one file with save_training_state(setup, path)"
)


@dataclass(frozen=True)
class Why:
    """Say why a checkpoint is lost.

    Args:
        cause: The cause, with ``{name}`` where ``name`` belongs.
        fix: What to change, likewise.
        name: The file or folder.
        pointer: A pointer named what was not complete.
    """

    cause: str
    fix: str
    name: str = ""
    pointer: bool = False


def explain(work: str, before: Tree, complete: Tree, acts: list[Act], point: Point, went_on: bool) -> Why:
    """Say why the checkpoint is lost, from what is in the folder after the death.

    Args:
        work: The folder.
        before: Its tree before the save.
        complete: Its tree after an undisturbed save.
        acts: What an undisturbed save does.
        point: Where the save died.
        went_on: It did not, but returned as if the disk were not full.

    Returns:
        The cause, established by what was there and is not, or is there and is not complete.
    """
    now = read_tree(work)
    pointed = _early_pointer(work, before, now, complete)
    if pointed is not None:
        pointer, target = pointed
        return Why(
            f"save() lets {pointer} name {target} before {target} is complete",
            f"write and os.fsync everything below {target} first, and replace {pointer} as the last thing, "
            "with os.replace",
            pointer=True,
        )
    left = _look(before, now, complete, acts, point)
    # the act that a limit begins with is done when the limit is reached; with a full disk, save() goes on
    done = acts if point.kind == "full-disk" else acts[: point.index + (point.kind != "act")]
    for name in [*left.missing, *(name for name in [*left.emptied, *left.short] if name in before)]:
        act = _act_on(done, name)
        if act is not None:
            return _removed(act, acts, complete)
    return _unfinished(left, before, point, went_on) or _one_by_one(left, before, complete)


@dataclass(frozen=True)
class _Left:
    """What a death has left in the folder.

    Args:
        missing: Files of the old checkpoint that are not there.
        emptied: Files of the old checkpoint that were opened for writing in place, and are not complete.
        short: New files, or other ones under an old name, that are not complete.
        appended: Files that a save only appends to.
        fresh: Files that are not those of the old checkpoint.
        kept: Files that are.
    """

    missing: list[str]
    emptied: list[str]
    short: list[str]
    appended: set[str]
    fresh: list[str]
    kept: list[str]


def _look(before: Tree, now: Tree, complete: Tree, acts: list[Act], point: Point) -> _Left:
    fresh = changed(before, now)
    appended = {act[1] for act in acts if act[0] == "append"}
    written = "" if point.written is None else point.written.name
    emptied = [
        name
        for name in fresh
        if name in before
        and now[name].inode == before[name].inode
        and name not in appended
        and (name == written or now[name].size_bytes < before[name].size_bytes)
    ]
    short = [name for name in fresh if name in complete and now[name].size_bytes < complete[name].size_bytes]
    if written in fresh and written in complete:
        short.insert(0, written)
    missing = [name for name in before if name not in now]
    return _Left(missing, emptied, short, appended, fresh, [name for name in now if name not in fresh])


def _unfinished(left: _Left, before: Tree, point: Point, went_on: bool) -> Why | None:
    """Why, where a file is incomplete in a place where it is looked for."""
    if left.emptied:
        cause = "save() opens {name} for writing in place, which empties it before the new data are complete"
        return Why(cause, _WRITE_ASIDE, left.emptied[0])
    if point.written is not None and point.written.name in left.appended:
        return Why(
            "save() appends to {name}, and load() does not pass over the end that is cut off",
            "let load() pass over what is incomplete at the end of {name}, or replace {name} as a whole",
            point.written.name,
        )
    for name in left.short:
        if went_on or (point.kind == "full-disk" and name in before):
            return Why(
                "save() goes on after a write has failed, and leaves {name} incomplete in its place",
                "let the error pass, and put files in their place only when all is written and synced",
                name,
            )
        if name not in before:
            return Why(
                "save() writes {name} under its final name, where load() finds it before it is complete",
                "write to a temporary file of another name beside it, flush and os.fsync it, os.rename it to {name} "
                "and os.fsync the folder",
                name,
            )
    return None


def _one_by_one(left: _Left, before: Tree, complete: Tree) -> Why:
    """Why, where all files that are there are whole."""
    replaced = [name for name in changed(before, complete) if name in before]
    if any(name in left.fresh for name in replaced) and any(name in left.kept for name in replaced):
        return Why(f"save() replaces the files of one checkpoint one after the other: {listed(replaced)}", ONE_FOLDER)
    new, old = listed(left.fresh), listed(left.kept)
    return Why(f"not established; at that moment {new} was new and {old} was still the old", ONE_FOLDER)


def _removed(act: Act, acts: list[Act], complete: Tree) -> Why:
    """Why, where a part of the old checkpoint was removed or renamed away."""
    kind, name, target = act
    folders = [goal for other, _, goal in acts if other == "rename" and name.startswith(goal + os.sep)]
    what = f"renames {name} to {target}" if kind == "rename" else f"removes {folders[0] if folders else name}"
    cause = f"save() {what} before the new checkpoint is complete and in its place"
    if folders:
        fix = (
            f"give each save a folder of its own, let a small file name the newest, and remove {folders[0]} after that"
        )
    elif name in complete:
        fix = f"write the new checkpoint beside it and os.fsync it first, then os.replace it over {name}"
    else:
        fix = f"write and os.fsync the new checkpoint first; {kind} {name} as the last thing"
    return Why(cause, fix)


def _early_pointer(work: str, before: Tree, now: Tree, complete: Tree) -> tuple[str, str] | None:
    """The new pointer, and what it names that is missing or incomplete."""
    for pointer in changed(before, now):
        entry = now[pointer]
        if entry.target is None and not 0 < entry.size_bytes <= _MAX_POINTER_BYTES:
            continue
        text = entry.target
        if text is None:
            with open(os.path.join(work, pointer), "rb") as file:
                text = file.read().decode(errors="replace").strip()
        for target in _named(pointer, text, complete):
            wanted = {n: e for n, e in complete.items() if n == target or n.startswith(target + os.sep)}
            if any(name in before for name in wanted):  # not what this save adds
                continue
            sizes = {name: now[name].size_bytes if name in now else -1 for name in wanted}
            if any(sizes[name] < whole.size_bytes for name, whole in wanted.items()):
                return pointer, target
    return None


def _named(pointer: str, text: str, complete: Tree) -> list[str]:
    """The paths of a complete save (files and their folders) that a pointer's text names, the longest first."""
    paths = set(complete)
    for name in complete:
        folder = os.path.dirname(name)
        while folder:
            paths.add(folder)
            folder = os.path.dirname(folder)
    paths = {path for path in paths if path != pointer and not pointer.startswith(path + os.sep)}
    tokens = [token.rstrip("/") for token in re.split(r"[^\w.\-/]+", text) if token]
    named = []
    for path in paths:
        beside = os.path.relpath(path, os.path.dirname(pointer) or ".")
        number = re.findall(r"\d+", os.path.basename(path))
        for token in tokens:
            is_path = token in (path, beside) or token.endswith(os.sep + path)
            is_number = len(tokens) == 1 and token.isdigit() and [int(token)] == [int(part) for part in number]
            if is_path or is_number:
                named.append(path)
    return sorted(set(named), key=lambda path: (-len(path), path))


def _act_on(done: list[Act], name: str) -> Act | None:
    for act in done:
        if act[0] in ("remove", "rename") and (act[1] == name or name.startswith(act[1] + os.sep)):
            return act
    return None


def listed(names: list[str]) -> str:
    """Name a few files, and how many more there are."""
    shown = names[:4]
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return ", ".join(shown + more) or "nothing"
