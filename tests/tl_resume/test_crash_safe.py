"""Savers that leave the last good checkpoint whole, and whether what they write is on the disk."""

import importlib.util
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

from tl_resume import assert_checkpoint_crash_safe, check_checkpoint_crash_safe
from tl_resume._crash import _pages, _sync
from tl_resume._crash._durable import find_unsynced
from tl_resume._crash._run import CrashRun
from tl_resume._crash._trial import Trial

spec = importlib.util.spec_from_file_location("crash_savers", Path(__file__).with_name("crash_savers.py"))
savers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(savers)

NEEDS_STRACE = pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")


def check(save, load=savers.load, **options):
    return check_checkpoint_crash_safe(
        savers.make_setup, savers.make_data(), savers.step, save=save, load=load, **options
    )


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@NEEDS_STRACE
def test_not_synced(monkeypatch):
    """A rename before the data are synced, and a folder that is never synced, are told."""
    setup = savers.make_setup()
    savers.step(setup, savers.make_data()[0])
    torch.save(savers.content(setup), "checkpoint.tmp")
    size = os.path.getsize("checkpoint.tmp")
    save = savers.save_unsynced
    report = check(save, crash_points=1)
    assert str(report) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[not-synced] a power loss right after the second save can take what it has saved\n"
        f"    checkpoint.tmp was renamed to checkpoint, and the {size:,} bytes of checkpoint were not synced before "
        "that\n"
        "    checkpoint.tmp was renamed to checkpoint, and the folder was not synced after it\n"
        "  cause: the data of a file can reach the disk after its name, which then names nothing whole; until its "
        "folder is synced, a rename can be undone by a power loss\n"
        "  fix: flush and os.fsync each file before the rename, and os.fsync the folder after the rename "
        "(os.open(folder, os.O_RDONLY) gives its descriptor); or let save_training_state(setup, path) do that"
    )
    monkeypatch.setattr(CrashRun, "judge", lambda *arguments: report)  # it need not be found again
    assert not check(save, allow=["checkpoint-mixed"]).ok
    assert check(save, allow=["not-synced"]).ok


@NEEDS_STRACE
def test_synced_too_late():
    """A sync after the rename is too late for the data, and one of the data alone leaves the rename open."""
    evidence = []
    for save in (savers.save_synced_late, savers.save_folder_unsynced):
        setup = savers.make_setup()
        trial = Trial(os.path.realpath(tempfile.mkdtemp(dir=".")), save, savers.load, 0)
        save(setup, trial.path)
        trial.keep_good()
        savers.step(setup, savers.make_data()[0])
        evidence.append(find_unsynced(trial, trial.record(setup), dict(trial.untouched)).finding(set()).evidence)
    assert evidence == [{"files": ("checkpoint",), "folders": ()}, {"files": (), "folders": (".",)}]


def test_dirty_pages_where_strace_is_not(monkeypatch):
    """Without strace the pages that are not on the disk tell of a missing sync, and the folder is not judged."""
    monkeypatch.setattr(_sync.shutil, "which", lambda name: None)
    report = check(savers.save_unsynced, crash_points=1)
    if not _pages.sees_unsynced_pages("."):
        assert [note.seen for note in report.notes] == [
            "could not judge whether files and folders are synced: neither strace nor the file system shows it here"
        ]
        return
    (finding,) = report.findings
    assert finding.rule == "not-synced"
    assert re.fullmatch(
        r"a power loss right after the second save can take what it has saved\n"
        r"before checkpoint.tmp is renamed to checkpoint, \d+ pages of checkpoint.tmp are not on the disk",
        finding.seen,
    )
    assert [note.seen for note in report.notes] == [
        "could not judge whether the folder is synced after a rename: that needs strace"
    ]


SAFE = {
    "written aside, synced and renamed": (savers.save_aside, savers.load),
    "a folder for each step and a pointer": (savers.save_steps, savers.load_latest),
    "two files in turn": (savers.save_alternating, savers.load_newest_valid),
    "a new folder, renamed": (savers.save_folder, savers.load_newest_folder),
    "a backup that load falls back to": (savers.save_with_backup, savers.load_or_backup),
}


@pytest.mark.parametrize("name", SAFE)
def test_safe_savers(name):
    """A saver that keeps the old checkpoint until the new one is in place passes without a word."""
    save, load = SAFE[name]
    assert str(check(save, load, crash_points=2)) == "Crash-safe checkpoint: passed"


def test_growing_log():
    """A log that a safe saver appends to, unsynced, is no fault."""
    report = check(savers.save_numbered, savers.load_numbered, crash_points=1)
    assert str(report) == "Crash-safe checkpoint: passed"


def test_patched_in_place():
    """A file that is changed in place without being emptied is left as it was, and not judged."""
    assert str(check(savers.save_patched, crash_points=1)) == (
        "Crash-safe checkpoint: passed, 1 note\n\nNotes:\n"
        "[not-judged] could not judge a death inside of note, which save() does not empty first"
    )


def test_safetensors():
    """safetensors written aside passes; that its writer leaves a temporary file of its own is only noted."""
    report = check(savers.save_safetensors, savers.load_safetensors, crash_points=2)
    assert report.ok
    assert {note.rule for note in report.notes} <= {"litter"}


def test_own_format():
    """The default save and load pass."""
    report = assert_checkpoint_crash_safe(savers.make_setup, savers.make_data(), savers.step)
    assert str(report) == "Crash-safe checkpoint: passed"
