"""What deaths in the middle of a save did to the checkpoint: the findings and their words."""

from __future__ import annotations

from dataclasses import dataclass

from tl_core import Finding
from tl_resume._crash._points import Point
from tl_resume._crash._watch import Act
from tl_resume._crash._why import ONE_FOLDER, Why, listed

LOST, FULL, MIXED, POINTER, UNNOTICED = (
    "checkpoint-lost-in-crash",
    "checkpoint-lost-on-full-disk",
    "checkpoint-mixed",
    "pointer-before-data",
    "full-disk-unnoticed",
)
_VERBS = {"remove": "removes", "rename": "renames", "truncate": "truncates", "link": "links"}


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
    fix = ONE_FOLDER if len(names) > 1 and rule != FULL else members[0].why.fix
    cause, fix = cause.replace("{name}", listed(names)), fix.replace("{name}", listed(names))
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
        return f"killed before save() {_act_in_words(first.act)}"
    assert first.written is not None
    numbers = [f"{point.num_bytes:,}" for point in sorted(points, key=lambda point: point.num_bytes)]
    listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    place = f"{listed} of {first.written.size_bytes:,} bytes of {first.written.name}"
    if first.kind == "full-disk":
        return f"disk full after {place}, {said}"
    if first.kind == "unfilled":
        return f"only {place} filled"
    return f"killed after {'about ' if first.kind == 'growth' else ''}{place}"


def _act_in_words(act: Act) -> str:
    """An act, as what ``save()`` does."""
    kind, first, second = act
    if kind in ("rename", "link"):
        return f"{_VERBS[kind]} {first} to {second}"
    return f"makes the link {first}" if kind == "symlink" else f"{_VERBS[kind]} {first}"
