"""The save after a crash: does it work, and does it clean up."""

from __future__ import annotations

from tl_core import Finding, TrainingSetup
from tl_resume._crash._points import Point
from tl_resume._crash._tree import Tree, read_tree
from tl_resume._crash._trial import Trial

FAILS_AFTER_CRASH = "save-fails-after-crash"
LITTER = "litter"


def next_save(
    trial: Trial, setup: TrainingSetup, points: list[Point], complete: Tree
) -> tuple[Finding | None, Finding | None]:
    """Save undisturbed after a save that was killed in the middle of a file.

    Args:
        trial: Where it is done.
        setup: What is saved.
        points: The points that were reached; the one in the middle of the first file is taken.
        complete: The tree after an undisturbed save.

    Returns:
        A finding when that save fails, and a note of what it leaves lying about.
    """
    inside = [point for point in points if point.kind == "byte"]
    if not inside:
        return None, None
    point = inside[len([one for one in inside if one.written == inside[0].written]) // 2]
    assert point.written is not None
    place = f"{point.num_bytes:,} of {point.written.size_bytes:,} bytes of {point.written.name}"
    trial.put_back()
    trial.save_until(setup, point)
    left = read_tree(trial.work)
    ended = trial.save_again(setup)
    if ended.raised is not None or ended.hung:
        raised = trial.without_folder(ended.raised or f"nothing, and did not end within {ended.limit_s:g} s")
        return (
            Finding(
                FAILS_AFTER_CRASH,
                f"after a save that was killed after {place}, the next save() raises {raised}",
                "what the killed save has left is in the way of the next",
                "let save() remove or overwrite what an earlier one has left, before it begins",
            ),
            None,
        )
    now = read_tree(trial.work)
    litter = [name for name in left if name in now and name not in complete and name not in trial.untouched]
    if not litter:
        return None, None
    size = sum(now[name].size_bytes for name in litter)
    seen = (
        f"a save that was killed after {place} leaves {', '.join(litter)} ({size:,} bytes), "
        "which the next save() does not remove"
    )
    return None, Finding(
        LITTER, seen, "", "let save() remove what an earlier one has left, or use the same temporary name each time"
    )
