"""Saving and loading in forked processes, in a folder that is put back each time."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_core import TrainingSetup, seed_everything
from tl_resume._crash._child import Ended, run_child
from tl_resume._crash._points import Point, Written
from tl_resume._crash._sync import Tracer
from tl_resume._crash._tree import Entry, Tree, changed, read_tree, restore
from tl_resume._crash._watch import OPENS, Act, Recording, kill_before, limit_from, watch
from tl_resume._crash._whole import State, fingerprints

UNDISTURBED_LIMIT_S = 30.0
MIN_LIMIT_S = 10.0
LIMIT_FACTOR = 20  # a child may take that many times the time of an undisturbed one
_SETTLE_S = 1.0  # how long a thread that a save has left is waited for
_MIN_WATCHED_BYTES = 1 << 20  # a smaller file is written before its growth can be seen
_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(frozen=True)
class Recorded:
    """What an undisturbed second save did.

    Args:
        ended: How the process that saved ended.
        acts: What it did to files.
        trees: The folder's tree before each act.
        after: Its tree in the end.
        trace: What strace wrote; None without strace.
        still_running: The thread or process that it left at work; None for none.
    """

    ended: Ended
    acts: list[Act]
    trees: list[Tree]
    after: Tree
    trace: list[str] | None
    still_running: str | None


@dataclass(frozen=True)
class Loaded:
    """What a load gave.

    Args:
        ended: How the process that loaded ended.
        state: The fingerprints of the state; None when it gave none.
    """

    ended: Ended
    state: State | None


class Trial:
    """Run second saves and loads against one good first checkpoint.

    Args:
        root: An empty folder, without symbolic links in its path.
        save: ``save(setup, path)``.
        load: ``load(setup, path)``.
        seed: Seeds each load.
    """

    def __init__(self, root: str, save: Callable[..., Any], load: Callable[..., Any], seed: int) -> None:
        self.work = os.path.join(root, "checkpoints")
        self.path = Path(self.work, "checkpoint")
        self._good = os.path.join(root, "good")
        self._log = os.path.join(root, "trace")
        self.save, self.load, self._seed = save, load, seed
        self._limit_s = UNDISTURBED_LIMIT_S
        self.untouched: Tree = {}
        os.mkdir(self.work)

    def keep_good(self) -> None:
        """Take the folder as it is as the good one, to which every second save begins."""
        shutil.copytree(self.work, self._good, symlinks=True)
        self.untouched = read_tree(self.work)

    def put_back(self) -> None:
        """Make the folder the good one again."""
        self.untouched = restore(self.work, self._good, self.untouched)

    def set_limit(self, least_s: float, *undisturbed_s: float) -> None:
        """Give further children a time limit, in seconds, by how long undisturbed saves and loads took."""
        self._limit_s = max(least_s, LIMIT_FACTOR * max(undisturbed_s))

    def record(self, setup: TrainingSetup) -> Recorded:
        """Save undisturbed, and see what that does to files."""

        def action() -> Mapping[str, Any]:
            threads = set(threading.enumerate())
            recording = Recording(self.work)
            watch(self.work, recording)
            self.save(setup, self.path)
            running = still_at_work(self.work, threads, processes=True)
            trees = [{name: _plain(entry) for name, entry in tree.items()} for tree in recording.trees]
            return {"acts": recording.acts, "trees": trees, "running": running}

        tracer = Tracer(self._log)
        try:
            ended = self._run(action, prepare=tracer.attach)
        finally:
            trace = tracer.lines()
        report = ended.report if ended.report is not None and ended.raised is None else {}
        trees = [{name: Entry(*entry) for name, entry in tree.items()} for tree in report.get("trees", [])]
        acts = [(kind, first, second) for kind, first, second in report.get("acts", [])]
        return Recorded(ended, acts, trees, read_tree(self.work), trace, report.get("running"))

    def save_again(self, setup: TrainingSetup) -> Ended:
        """Save undisturbed into the folder as it is."""

        def action() -> Mapping[str, Any]:
            self.save(setup, self.path)
            return {}

        return self._run(action)

    def save_until(self, setup: TrainingSetup, point: Point) -> Ended:
        """Save, with the disturbance of a point."""

        def action() -> Mapping[str, Any]:
            if point.kind == "act":
                watch(self.work, kill_before(point.index))
            elif point.kind != "growth":
                watch(self.work, limit_from(point.index, point.num_bytes, die=point.kind == "byte"))
            self.save(setup, self.path)
            return {}

        if point.kind == "growth" and point.written is not None:
            return self._run(action, kill_when=self._has_grown(point.written, point.num_bytes))
        return self._run(action)

    def save_unfilled(self, setup: TrainingSetup, point: Point, acts: list[Act]) -> tuple[Ended, bool]:
        """Leave what a writer leaves that claims a file's size, and is killed when it has filled a part of it.

        The save is killed before the next rename or the like, when the file is whole, and the rest of it is zeroed.

        Returns:
            How the save ended, and whether the file was there.
        """
        assert point.written is not None
        later = [index for index, act in enumerate(acts) if index > point.index and act[0] not in OPENS]
        ended = self.save_until(setup, Point("act", later[0])) if later else self.save_again(setup)
        now = read_tree(self.work)
        sizes = {name: now[name].size_bytes for name in changed(self.untouched, now) if now[name].target is None}
        if not sizes:
            return ended, False
        expected = point.written  # a temporary name, and a size, can differ from save to save
        name = min(sizes, key=lambda name: (name != expected.name, abs(sizes[name] - expected.size_bytes)))
        with open(os.path.join(self.work, name), "r+b") as file:
            file.truncate(min(point.num_bytes, sizes[name]))
            file.truncate(sizes[name])
        return ended, True

    def load_into(self, setup: TrainingSetup) -> Loaded:
        """Load into a copy of a setup and give the fingerprints of what that makes of it."""

        def action() -> Mapping[str, Any]:
            seed_everything(self._seed)
            self.load(setup, self.path)
            return {"state": fingerprints(setup)}

        ended = self._run(action)
        return Loaded(ended, None if ended.report is None else ended.report.get("state"))

    def can_watch_growth(self, written: Written) -> bool:
        """Whether a file is big enough to kill its writer while it grows."""
        return written.size_bytes >= _MIN_WATCHED_BYTES

    def _has_grown(self, written: Written, num_bytes: int) -> Callable[[], bool]:
        before = self.untouched

        def has_grown() -> bool:
            for name, entry in read_tree(self.work).items():
                if before.get(name) != entry and entry.size_bytes == written.size_bytes:
                    try:
                        blocks = os.stat(os.path.join(self.work, name)).st_blocks
                    except FileNotFoundError:
                        continue
                    if num_bytes <= blocks * _BLOCK_BYTES < written.size_bytes:
                        return True
            return False

        return has_grown

    def _run(self, action: Callable[[], Mapping[str, Any]], **options: Any) -> Ended:
        return run_child(action, limit_s=self._limit_s, **options)

    def without_folder(self, text: str) -> str:
        """A message without the temporary folder's name in its paths."""
        return text.replace(self.work + os.sep, "").replace(self.work, ".")


def _plain(entry: Entry) -> list[Any]:
    return [entry.inode, entry.size_bytes, entry.changed_ns, entry.target]


def still_at_work(folder: str, known: set[threading.Thread], *, processes: bool) -> str | None:
    """The thread or process that goes on to change files after ``save`` has returned; None for none.

    Args:
        folder: Where the files are.
        known: The threads that were there before the save.
        processes: Look for child processes too.
    """

    def at_work() -> list[str]:
        names = [f"the thread {thread.name!r}" for thread in threading.enumerate() if thread not in known]
        return [*names, "a process"] if processes and _has_children() else names

    names = at_work()
    if not names:
        return None
    tree = read_tree(folder)
    until = time.monotonic() + _SETTLE_S
    while at_work() and time.monotonic() < until:
        time.sleep(0.005)
    return names[0] if read_tree(folder) != tree else None


def _has_children() -> bool:
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
