"""What a death in the middle of a save did to the checkpoint, and why."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from tl_core import Finding
from tl_resume._crash._points import Point
from tl_resume._crash._tree import Tree, changed, read_tree
from tl_resume._crash._watch import Act

LOST, FULL, MIXED, POINTER, UNNOTICED = (
    "checkpoint-lost-in-crash",
    "checkpoint-lost-on-full-disk",
    "checkpoint-mixed",
    "pointer-before-data",
    "full-disk-unnoticed",
)
_MAX_POINTER_BYTES = 4096
_WRITE_ASIDE = (
    "write to a temporary file beside it, flush and os.fsync it, os.replace it over {name} and os.fsync the folder; "
    "or let save_training_state(setup, path) do all that"
)
_ONE_FOLDER = (
    "write all files of a save into a new folder, os.fsync them, and only then make that folder the current one with a "
    "single rename; or write one file with save_training_state(setup, path)"
)
_VERBS = {"remove": "removes", "rename": "renames", "truncate": "truncates", "link": "links", "symlink": "links"}


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


@dataclass(frozen=True)
class Lost:
    """Describe one point after which ``load`` gave neither the old nor the new state.

    Args:
        point: The point.
        fault: What ``load`` did, in words.
        mixed: It gave parts of both states.
        why: The established cause.
        said: What ``save`` said, where it lived on.
    """

    point: Point
    fault: str
    mixed: bool
    why: Why
    said: str = ""


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
    appended = {act[1] for act in acts if act[0] == "append"}
    emptied = [name for name in changed(before, now) if name in before and now[name].inode == before[name].inode]
    written = "" if point.written is None else point.written.name
    incomplete = [
        name
        for name in emptied
        if name not in appended and (name == written or now[name].size_bytes < before[name].size_bytes)
    ]
    # the act that a limit begins with is done when the limit is reached; with a full disk, save() goes on
    done = acts if point.kind == "full-disk" else acts[: point.index + (point.kind != "act")]
    fresh = changed(before, now)
    kept = [name for name in now if name not in fresh]
    short = [name for name in fresh if name in complete and now[name].size_bytes < complete[name].size_bytes]
    if written in fresh and written in complete:
        short.insert(0, written)
    missing = [name for name in before if name not in now]
    for name in [*missing, *(name for name in [*incomplete, *short] if name in before)]:
        act = _act_on(done, name)
        if act is not None:
            return _removed(act, acts, complete)
    if incomplete:
        cause = "save() opens {name} for writing in place, which empties it before the new data are complete"
        return Why(cause, _WRITE_ASIDE, incomplete[0])
    if written in appended:
        return Why(
            "save() appends to {name}, and load() does not pass over the end that is cut off",
            "let load() pass over what is incomplete at the end of {name}, or replace {name} as a whole",
            written,
        )
    for name in short:
        if went_on or (point.kind == "full-disk" and name in before):
            return Why(
                "save() goes on after a write has failed, and leaves {name} incomplete in its place",
                "let the error pass, and put files in their place only when all is written and synced",
                name,
            )
        if name in before:
            continue
        return Why(
            "save() writes {name} under its final name, where load() finds it before it is complete",
            "write to a temporary file of another name beside it, flush and os.fsync it, os.rename it to {name} and "
            "os.fsync the folder",
            name,
        )
    replaced = [name for name in changed(before, complete) if name in before]
    if any(name in fresh for name in replaced) and any(name in kept for name in replaced):
        return Why(f"save() replaces the files of one checkpoint one after the other: {_listed(replaced)}", _ONE_FOLDER)
    cause = f"not established; at that moment {_listed(fresh)} was new and {_listed(kept)} was still the old"
    return Why(cause, _ONE_FOLDER)


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


def _listed(names: list[str]) -> str:
    shown = names[:4]
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return ", ".join(shown + more) or "nothing"


def findings(lost: list[Lost], old_name: str) -> list[Finding]:
    """One finding for each rule and cause; a full disk that costs what a death costs too is told there."""
    groups: dict[tuple[str, str], list[Lost]] = {}
    for one in sorted(lost, key=lambda one: one.point.kind == "full-disk"):
        rule = POINTER if one.why.pointer else MIXED if one.mixed else LOST
        if one.point.kind == "full-disk" and (rule, one.why.cause) not in groups:
            rule = FULL
        groups.setdefault((rule, one.why.cause), []).append(one)
    return [_finding(rule, cause, members, old_name) for (rule, cause), members in groups.items()]


def _finding(rule: str, cause: str, members: list[Lost], old_name: str) -> Finding:
    by_fault: dict[tuple[str, str], list[Point]] = {}
    for one in members:
        by_fault.setdefault((one.fault, one.said), []).append(one.point)
    lines = [f"{line}: {fault}" for (fault, said), points in by_fault.items() for line in _in_words(points, said)]
    what = "when the disk is full in the second save" if rule == FULL else "when the second save is killed"
    gone = f"the checkpoint of {old_name} {'is not found' if rule == POINTER else 'is gone'} {what}"
    gone = f"what is left mixes two saves {what}" if rule == MIXED else gone
    names = list(dict.fromkeys(one.why.name for one in members))
    fix = _ONE_FOLDER if len(names) > 1 and rule != FULL else members[0].why.fix
    cause, fix = cause.replace("{name}", _listed(names)), fix.replace("{name}", _listed(names))
    evidence = {"points": tuple(_evidence(one.point) for one in members)}
    return Finding(rule, gone + "".join(f"\n{line}" for line in lines), cause, fix, evidence=evidence)


def unnoticed(point: Point, said: str) -> Finding:
    """The note that a full disk costs no checkpoint, but nobody is told that none was written."""
    seen = f"{_line([point], said)}, and load() gives the old state"
    return Finding(UNNOTICED, seen, "", "let the error pass, so that the run does not go on unsaved")


def _evidence(point: Point) -> dict[str, object]:
    name = point.written.name if point.written is not None else " ".join(part for part in point.act or () if part)
    return {"kind": point.kind, "at": name, "bytes": point.num_bytes}


def _in_words(points: list[Point], said: str) -> list[str]:
    """The points, those inside of one file on one line."""
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        name = "" if point.written is None else point.written.name
        lines.setdefault((point.kind, name or repr(point.index)), []).append(point)
    return [_line(members, said) for members in lines.values()]


def _line(points: list[Point], said: str) -> str:
    first = points[0]
    if first.act is not None:
        return f"killed before save() {act_in_words(first.act)}"
    assert first.written is not None
    numbers = [f"{point.num_bytes:,}" for point in sorted(points, key=lambda point: point.num_bytes)]
    listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    place = f"{listed} of {first.written.size_bytes:,} bytes of {first.written.name}"
    if first.kind == "full-disk":
        return f"disk full after {place}, {said}"
    if first.kind == "unfilled":
        return f"only {place} filled"
    return f"killed after {'about ' if first.kind == 'growth' else ''}{place}"


def act_in_words(act: Act) -> str:
    """An act, as what ``save()`` does."""
    kind, first, second = act
    if kind in ("rename", "link"):
        return f"{_VERBS[kind]} {first} to {second}"
    return f"makes the link {first}" if kind == "symlink" else f"{_VERBS[kind]} {first}"
