"""One run of the check: the loop, its first save, and the second one that dies again and again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tl_core import Batches, Finding, Report, TrainingSetup, build_setup, noted, seed_everything
from tl_resume._crash import _trial
from tl_resume._crash._child import Ended
from tl_resume._crash._durable import Unsynced, find_unsynced
from tl_resume._crash._judge import Lost, findings, unnoticed
from tl_resume._crash._next import next_save
from tl_resume._crash._points import Point, choose_points, written_files
from tl_resume._crash._tree import Tree, changed, read_tree
from tl_resume._crash._trial import Loaded, Recorded, Trial, still_at_work
from tl_resume._crash._watch import Act
from tl_resume._crash._whole import References, fingerprints, mixture
from tl_resume._crash._why import explain

_CHECK = "Crash-safe checkpoint"
NOT_JUDGED = "not-judged"


def could_not_judge(reason: str) -> Report:
    """A report that nothing was judged, and why."""
    return Report(_CHECK, notes=(_note(f"could not judge: {reason}"),), judged=False)


class _CannotJudge(Exception):  # noqa: N818  it never leaves this module
    pass


class CrashRun:
    """Run the loop once, and its second save many times.

    Args:
        trial: Where saves and loads are done.
        steps: How many steps the loop has.
        crash_points: How many points inside of each file; None for a few, of a few files.
    """

    def __init__(self, trial: Trial, steps: int, crash_points: int | None) -> None:
        self._trial = trial
        self._half, self._steps, self._crash_points = steps // 2, steps, crash_points
        self._old_name, self._new_name = f"step {self._half}", f"step {steps}"
        self._notes: list[Finding] = []

    def judge(
        self,
        make_setup: Callable[..., Any],
        batches: Batches,
        train_step: Callable[[TrainingSetup, Any], Any],
        seed: int,
    ) -> Report:
        """Run everything and report."""
        try:
            setup, fresh = self._train(make_setup, batches, train_step, seed)
            found = self._judge(setup, fresh)
        except _CannotJudge as reason:
            return could_not_judge(str(reason))
        return Report(_CHECK, tuple(found), tuple(self._notes))

    def _train(
        self,
        make_setup: Callable[..., Any],
        batches: Batches,
        train_step: Callable[[TrainingSetup, Any], Any],
        seed: int,
    ) -> tuple[TrainingSetup, TrainingSetup]:
        """The setup at its end, with a checkpoint of its half in the folder; and one that was just built."""
        seed_everything(seed)
        setup = build_setup(make_setup)
        for index in range(self._steps):
            if index == self._half:
                setup.step_index = index
                self._first_save(setup)
            setup.step_index = index
            batch = batches.batch(index)
            with noted(f"raised in step {index} of the training run; data was taken as {batches.form}"):
                train_step(setup, batch)
        setup.step_index = self._steps
        seed_everything((seed + 1) % 2**32)  # what load does not restore must not look restored
        return setup, build_setup(make_setup)

    def _first_save(self, setup: TrainingSetup) -> None:
        trial = self._trial
        threads = set(threading.enumerate())
        started = time.monotonic()
        with noted(f"raised in save(), the first one, after {self._half} steps"):
            trial.save(setup, trial.path)
        trial.set_limit(_trial.UNDISTURBED_LIMIT_S, time.monotonic() - started)
        running = still_at_work(trial.work, threads, processes=False)
        if running is not None:
            raise _CannotJudge(f"save() returns before it has written: {running} goes on writing")
        if not read_tree(trial.work):
            raise _CannotJudge("save() wrote nothing at the path that it was given, nor beside it")
        trial.keep_good()

    def _judge(self, setup: TrainingSetup, fresh: TrainingSetup) -> list[Finding]:
        trial = self._trial
        before = dict(trial.untouched)
        recorded = self._record(setup)
        unsynced = find_unsynced(trial, recorded, before)
        references = self._references(setup, fresh, recorded)
        files = written_files(recorded.acts, before, recorded.trees, recorded.after)
        points, left_out = choose_points(files, recorded.acts, self._crash_points)
        self._notes += [_note(f"{text}: no save died there; crash_points= takes all") for text in left_out]
        lost, reached = self._die(setup, fresh, points, recorded, references, unsynced)
        found = findings(lost, self._old_name)
        in_place = {file.name for file in files if file.in_place}
        finding = unsynced.finding(in_place if lost else set())
        found += [] if finding is None else [finding]
        self._notes += map(_note, unsynced.reasons)
        if not lost:
            finding, litter = next_save(trial, setup, reached, recorded.after)
            found += [] if finding is None else [finding]
            self._notes += [] if litter is None else [litter]
        return found

    def _record(self, setup: TrainingSetup) -> Recorded:
        trial = self._trial
        recorded = trial.record(setup)
        if recorded.ended.raised is not None:
            trial.put_back()
            with noted(f"raised in save(), the second one to the same path, after {self._steps} steps"):
                trial.save(setup, trial.path)
        self._must_have_ended("save()", recorded.ended)
        if recorded.still_running is not None:
            raise _CannotJudge(f"save() returns before it has written: {recorded.still_running} goes on writing")
        if not changed(trial.untouched, recorded.after):
            raise _CannotJudge("the second save() to the same path wrote nothing there")
        return recorded

    def _must_have_ended(self, what: str, ended: Ended) -> None:
        last = ended.output.strip().split("\n")[-1]
        printed = f"; the last that it printed is {self._trial.without_folder(last)!r}" if last else ""
        if ended.hung:
            raise _CannotJudge(f"{what} did not end within {ended.limit_s:g} s in a forked process{printed}")
        if ended.raised is not None:
            raised = self._trial.without_folder(ended.raised)
            raise _CannotJudge(f"{what} raises {raised} in a forked process, but not in this one")
        if ended.report is None:
            by = f" by {signal.Signals(ended.signal).name}" if ended.signal else ""
            raise _CannotJudge(f"{what} ended its forked process{by}{printed}")

    def _references(self, setup: TrainingSetup, fresh: TrainingSetup, recorded: Recorded) -> References:
        """What intact loads give; the folder is the good one afterwards."""
        trial = self._trial
        built = fingerprints(fresh)
        new = self._intact(fresh, "the second save")
        trial.put_back()
        old, again = (self._intact(fresh, "the first save") for _ in range(2))
        trial.set_limit(_trial.MIN_LIMIT_S, recorded.ended.duration_s, old.ended.duration_s, new.ended.duration_s)
        states = [loaded.state or {} for loaded in (old, new, again)]
        unsteady = frozenset(path for path in {*states[0], *states[2]} if states[0].get(path) != states[2].get(path))
        references = References(built, states[0], states[1], unsteady)
        if not references.distinct(references.old, references.new):
            if not references.distinct(references.old, built):
                raise _CannotJudge("load() changes nothing in a fresh setup, so a lost checkpoint cannot be told")
            raise _CannotJudge(
                f"load() gives the same state after the save of {self._new_name} as after that of {self._old_name}"
            )
        return references

    def _intact(self, fresh: TrainingSetup, after: str) -> Loaded:
        loaded = self._trial.load_into(fresh)
        if loaded.ended.raised is not None:
            with noted(f"raised in load() after {after}, which nothing disturbed"):
                self._trial.load(fresh, self._trial.path)
        self._must_have_ended("load()", loaded.ended)
        return loaded

    def _die(
        self,
        setup: TrainingSetup,
        fresh: TrainingSetup,
        points: list[Point],
        recorded: Recorded,
        references: References,
        unsynced: Unsynced,
    ) -> tuple[list[Lost], list[Point]]:
        """Let a save die at each point, and load: what was lost, and the points that were reached."""
        lost: list[Lost] = []
        reached: list[Point] = []
        missed: dict[str, None] = {}
        compared = False
        for point in points:
            before, tried, ended = self._save_until(setup, point, recorded.acts)
            if isinstance(tried, str):
                missed[tried] = None
                continue
            reached.append(tried)
            if tried.act is not None:
                unsynced.look(before, tried.act)
            # before load, which may tidy up
            went_on = tried.kind == "full-disk" and ended.report is not None and ended.raised is None
            why = explain(self._trial.work, before, recorded.after, recorded.acts, tried, went_on)
            loaded = self._trial.load_into(fresh)
            fault, mixed = self._fault(loaded, references)
            if mixed and not compared:
                references, compared = self._compared(setup, fresh, references), True
                fault, mixed = self._fault(loaded, references)
            if fault:
                said = _said(ended, self._trial) if tried.kind == "full-disk" else ""
                lost.append(Lost(tried, fault, mixed, why, said))
            elif (
                tried.kind == "full-disk"
                and ended.raised is None
                and references.distinct(loaded.state or {}, references.new)
            ):
                self._notes.append(unnoticed(tried, _said(ended, self._trial)))
            if loaded.ended.hung:
                self._notes.append(_note("could not judge the points after the one at which load() hung"))
                break
        self._notes += [_note(f"could not judge {where}") for where in missed]
        return lost, reached

    def _compared(self, setup: TrainingSetup, fresh: TrainingSetup, references: References) -> References:
        """Leave out what two undisturbed saves of one state save differently, such as the time."""
        trial = self._trial
        trial.put_back()
        trial.save_again(setup)
        new = trial.load_into(fresh).state
        if new is None:
            return references
        return replace(references, unsteady=references.unsteady.union(references.distinct(references.new, new)))

    def _save_until(self, setup: TrainingSetup, point: Point, acts: list[Act]) -> tuple[Tree, Point | str, Ended]:
        """The tree before, the point as it was reached (or why it was not), and how the save ended."""
        trial = self._trial
        trial.put_back()
        before = dict(trial.untouched)
        ended = trial.save_until(setup, point)
        if point.kind == "act":
            return before, point if ended.signal == signal.SIGKILL else _missed(point), ended
        if point.kind == "full-disk":
            return before, point if ended.report is not None or ended.hung else _missed(point), ended
        if ended.signal == getattr(signal, "SIGXFSZ", None) and _has_reached(trial.work, before, point):
            return before, point, ended
        assert point.written is not None
        left = read_tree(trial.work).get(point.written.name)
        if point.written.in_place and left is not None and left.size_bytes == before[point.written.name].size_bytes:
            return before, f"a death inside of {point.written.name}, which save() does not empty first", ended
        trial.put_back()  # its writer claims the whole size at once
        before = dict(trial.untouched)
        if trial.can_watch_growth(point.written):
            tried = replace(point, kind="growth")
            ended = trial.save_until(setup, tried)
            return before, tried if ended.signal == signal.SIGKILL else _missed(point), ended
        ended, unfilled = trial.save_unfilled(setup, point, acts)
        return before, replace(point, kind="unfilled") if unfilled else _missed(point), ended

    def _fault(self, loaded: Loaded, references: References) -> tuple[str, bool]:
        ended = loaded.ended
        if ended.hung:
            return f"load() did not end within {ended.limit_s:g} s", False
        if ended.raised is not None:
            return f"load() raises {self._trial.without_folder(ended.raised)}", False
        if loaded.state is None:
            by = signal.Signals(ended.signal).name if ended.signal else "its own exit"
            return f"load() was ended by {by}", False
        mixed = mixture(loaded.state, references, self._old_name, self._new_name)
        return ("", False) if mixed is None else (mixed[1], not mixed[0])


def _has_reached(work: str, before: Tree, point: Point) -> bool:
    """Whether a file ends where the point is; a temporary file may have another name each time."""
    now = read_tree(work)
    reached = [name for name in now if now[name].size_bytes == point.num_bytes]
    if point.written is not None and point.written.begin == point.num_bytes and point.written.name in reached:
        return True  # nothing is appended yet
    return any(name in reached for name in changed(before, now))


def _missed(point: Point) -> str:
    if point.written is None:
        return "a rename or removal that save() does not do each time at the same place"
    if point.kind == "full-disk":
        return f"a full disk at {point.written.name}: the limit killed the save instead"
    return (
        f"a death inside of {point.written.name}: its writer claims all of its "
        f"{point.written.size_bytes:,} bytes before the first is written, and is done before it can be stopped"
    )


def _said(ended: Ended, trial: Trial) -> str:
    if ended.hung:
        return f"save() did not end within {ended.limit_s:g} s"
    if ended.raised is None:
        return "save() returns as if it had saved"
    return f"save() raises {trial.without_folder(ended.raised)}"


def _note(text: str) -> Finding:
    return Finding(NOT_JUDGED, text, cause="", fix="")
