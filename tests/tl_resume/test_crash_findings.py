"""Savers that lose the last good checkpoint in a crash, and those that do not."""

import importlib.util
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tl_core import CheckFailed
from tl_resume import assert_checkpoint_crash_safe, check_checkpoint_crash_safe
from tl_resume._crash import _trial

spec = importlib.util.spec_from_file_location("crash_savers", Path(__file__).with_name("crash_savers.py"))
savers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(savers)

ASIDE = (
    "write to a temporary file beside it, flush and os.fsync it, os.replace it over {name} and os.fsync the folder; "
    "or let save_training_state(setup, path) do all that"
)


def check(save, load=savers.load, **options):
    return check_checkpoint_crash_safe(
        savers.make_setup, savers.make_data(), savers.step, save=save, load=load, **options
    )


def saved_bytes(state=None):
    """The content of a file of the loop's end."""
    setup = savers.make_setup()
    for batch in savers.make_data():
        savers.step(setup, batch)
    path = "saved.tmp"
    savers.write(savers.content(setup) if state is None else savers.content(setup)[state], path)
    with open(path, "rb") as file:
        data = file.read()
    os.remove(path)
    return data


def load_error(data):
    """What torch.load says of a damaged file."""
    with open("damaged.tmp", "wb") as file:
        file.write(data)
    with pytest.raises((OSError, RuntimeError, EOFError)) as caught:
        torch.load("damaged.tmp")
    os.remove("damaged.tmp")
    text = textwrap.shorten(str(caught.value).split("\n")[0], 160, placeholder=" ...")
    return f"{type(caught.value).__name__}: {text}" if text else type(caught.value).__name__


def full(place, size_bytes):
    return f"disk full after {size_bytes // 2:,} of {size_bytes:,} bytes of {place}"


TOO_LARGE = "save() raises OSError: [Errno 27] File too large"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_in_place():
    """A file that is written in place is lost from its first byte on."""
    data = saved_bytes()
    size = len(data)
    third = (size - 1) // 3
    error = load_error(data[: size // 2])
    with pytest.raises(CheckFailed) as caught:
        assert_checkpoint_crash_safe(
            savers.make_setup, savers.make_data(), savers.step, save=savers.save_in_place, load=savers.load
        )
    assert str(caught.value) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[checkpoint-lost-in-crash] the checkpoint of step 2 is gone when the second save is killed\n"
        f"    killed after 0 of {size:,} bytes of checkpoint: load() raises {load_error(b'')}\n"
        f"    killed after {third:,}, {(size - 1) * 2 // 3:,} and {size - 1:,} of {size:,} bytes of checkpoint: "
        f"load() raises {error}\n"
        f"    {full('checkpoint', size)}, {TOO_LARGE}: load() raises {error}\n"
        "  cause: save() opens checkpoint for writing in place, which empties it before the new data are complete\n"
        f"  fix: {ASIDE.format(name='checkpoint')}"
    )


def test_torch_save_by_path():
    """torch.save(state, path), whose writer Python does not see, is caught at the same bytes."""
    report = check(lambda setup, path: torch.save(savers.content(setup), path), crash_points=2)
    (finding,) = report.findings
    points = finding.evidence["points"]
    assert finding.rule == "checkpoint-lost-in-crash"
    assert [(point["kind"], point["at"]) for point in points] == [
        ("byte", "checkpoint"),
        ("byte", "checkpoint"),
        ("full-disk", "checkpoint"),
    ]
    assert points[0]["bytes"] == 0
    assert points[1]["bytes"] // 2 == points[2]["bytes"] > 5000


def test_removed_before_the_new_one_is_in_place():
    """An old checkpoint that is removed first is lost between its removal and the rename."""
    assert str(check(savers.save_after_removal, crash_points=1)) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[checkpoint-lost-in-crash] the checkpoint of step 2 is gone when the second save is killed\n"
        "    killed before save() renames checkpoint.tmp to checkpoint: load() raises FileNotFoundError: "
        "[Errno 2] No such file or directory: 'checkpoint'\n"
        "  cause: save() removes checkpoint before the new checkpoint is complete and in its place\n"
        "  fix: write the new checkpoint beside it and os.fsync it first, then os.replace it over checkpoint"
    )


@pytest.mark.parametrize(
    ("save", "load", "pointer"),
    [
        (savers.save_pointer_first, savers.load_latest, "latest"),
        (savers.save_link_first, savers.load_link, "newest"),
    ],
)
def test_pointer_before_its_data(save, load, pointer):
    """A file or link that names the newest checkpoint before that is written leads into nothing."""
    data = saved_bytes()
    size = len(data)
    report = check(save, load, crash_points=2)
    error = load_error(data[:-1])
    place = f"of {size:,} bytes of checkpoint/step_4/state.pt"
    assert str(report) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[pointer-before-data] the checkpoint of step 2 is not found when the second save is killed\n"
        f"    killed after 0 {place}: load() raises {load_error(b'')}\n"
        f"    killed after {size - 1:,} {place}: load() raises {error}\n"
        f"    {full('checkpoint/step_4/state.pt', size)}, {TOO_LARGE}: load() raises {load_error(data[: size // 2])}\n"
        f"  cause: save() lets checkpoint/{pointer} name checkpoint/step_4 before checkpoint/step_4 is complete\n"
        "  fix: write and os.fsync everything below checkpoint/step_4 first, and replace "
        f"checkpoint/{pointer} as the last thing, with os.replace"
    )


ONE_FOLDER = (
    "write all files of a save into a new folder, os.fsync them, and only then make that folder the current one with a "
    "single rename; or write one file with save_training_state(setup, path)"
)


@pytest.mark.parametrize(
    ("save", "load", "rule", "cause", "fix"),
    [
        (
            savers.save_number_first,
            savers.load_number,
            "pointer-before-data",
            "save() lets checkpoint/latest name checkpoint/0004.pt before checkpoint/0004.pt is complete",
            "write and os.fsync everything below checkpoint/0004.pt first, and replace checkpoint/latest as the last "
            "thing, with os.replace",
        ),
        (
            savers.save_final_name,
            savers.load_numbered,
            "checkpoint-lost-in-crash",
            "save() writes checkpoint/0004.pt under its final name, where load() finds it before it is complete",
            "write to a temporary file of another name beside it, flush and os.fsync it, os.rename it to "
            "checkpoint/0004.pt and os.fsync the folder",
        ),
        (
            savers.save_after_rotation,
            savers.load_numbered,
            "checkpoint-lost-in-crash",
            "save() removes checkpoint/0002.pt before the new checkpoint is complete and in its place",
            "write and os.fsync the new checkpoint first; remove checkpoint/0002.pt as the last thing",
        ),
        (
            savers.save_after_unlink,
            savers.load,
            "checkpoint-lost-in-crash",
            "save() removes checkpoint before the new checkpoint is complete and in its place",
            "write the new checkpoint beside it and os.fsync it first, then os.replace it over checkpoint",
        ),
        (
            savers.save_renaming_away,
            savers.load,
            "checkpoint-lost-in-crash",
            "save() renames checkpoint to checkpoint.old before the new checkpoint is complete and in its place",
            "write the new checkpoint beside it and os.fsync it first, then os.replace it over checkpoint",
        ),
        (
            savers.save_after_rmtree,
            savers.load_pieces,
            "checkpoint-lost-in-crash",
            "save() removes checkpoint before the new checkpoint is complete and in its place",
            "give each save a folder of its own, let a small file name the newest, and remove checkpoint after that",
        ),
        (
            savers.save_pieces_in_place,
            savers.load_pieces,
            "checkpoint-lost-in-crash",
            "save() opens checkpoint/model.pt, checkpoint/optimizer.pt for writing in place, which empties it before "
            "the new data are complete",
            ONE_FOLDER,
        ),
    ],
)
def test_causes(save, load, rule, cause, fix):
    """The cause is told from what is in the folder at the death."""
    (finding,) = check(save, load, crash_points=1).findings
    assert (finding.rule, finding.cause, finding.fix) == (rule, cause, fix)


def test_pieces_of_two_saves():
    """Files that are replaced one after the other are loaded as a mixture."""
    size = len(saved_bytes("optimizer"))
    report = check(savers.save_pieces, savers.load_pieces, crash_points=2)
    fault = "load() returns without an error, but gives optimizer 'optimizer' of step 2 and the model of step 4"
    assert str(report) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[checkpoint-mixed] what is left mixes two saves when the second save is killed\n"
        f"    killed after 0 and {size - 1:,} of {size:,} bytes of checkpoint/optimizer.tmp: "
        f"{fault}\n"
        f"    killed before save() renames checkpoint/optimizer.tmp to checkpoint/optimizer.pt: {fault}\n"
        f"    {full('checkpoint/optimizer.tmp', size)}, {TOO_LARGE}: {fault}\n"
        "  cause: save() replaces the files of one checkpoint one after the other: "
        "checkpoint/model.pt, checkpoint/optimizer.pt\n"
        "  fix: write all files of a save into a new folder, os.fsync them, and only then make that folder the "
        "current one with a single rename; or write one file with save_training_state(setup, path)"
    )


def test_full_disk_is_ignored():
    """A saver that goes on after a failed write puts a partial file in the place of the good one."""
    data = saved_bytes()
    half = len(data) // 2
    assert str(check(savers.save_swallowing, crash_points=1)) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        "[checkpoint-lost-on-full-disk] the checkpoint of step 2 is gone when the disk is full in the second save\n"
        f"    {full('checkpoint.tmp', len(data))}, save() returns as if it had saved: "
        f"load() raises {load_error(data[:half])}\n"
        "  cause: save() goes on after a write has failed, and leaves checkpoint incomplete in its place\n"
        "  fix: let the error pass, and put files in their place only when all is written and synced"
    )


def test_full_disk_goes_unnoticed():
    """A saver that keeps the old checkpoint and says nothing of the full disk gets a note."""

    def save(setup, path):
        try:
            savers.save_aside(setup, path)
        except (OSError, RuntimeError):
            print("could not save")

    size = len(saved_bytes())
    assert str(check(save, crash_points=1)) == (
        "Crash-safe checkpoint: passed, 1 note\n\n"
        f"Notes:\n[full-disk-unnoticed] {full('checkpoint.tmp', size)}, save() returns as if it had saved, "
        "and load() gives the old state\n"
        "  fix: let the error pass, so that the run does not go on unsaved"
    )


def test_load_that_begins_anew():
    """A load that finds nothing and says nothing has lost the checkpoint all the same."""
    (finding,) = check(savers.save_in_place, savers.load_if_there, crash_points=1).findings
    assert finding.rule == "checkpoint-lost-in-crash"
    assert finding.seen.split("\n")[1].partition(": ")[2] == (
        "load() returns without an error, and the setup is as make_setup() built it"
    )


def test_load_that_waits_for_ever(monkeypatch):
    """A load that never ends is killed, told, and not tried again."""
    monkeypatch.setattr(_trial, "MIN_LIMIT_S", 0.5)
    monkeypatch.setattr(_trial, "LIMIT_FACTOR", 0)
    size = len(saved_bytes())
    report = check(savers.save_in_place, savers.load_waiting)
    assert [finding.seen for finding in report.findings] == [
        "the checkpoint of step 2 is gone when the second save is killed\n"
        f"killed after 0 of {size:,} bytes of checkpoint: load() did not end within 0.5 s"
    ]
    assert [note.seen for note in report.notes] == ["could not judge the points after the one at which load() hung"]


def test_next_save_fails():
    """A saver that stumbles over what a crash has left never saves again."""
    size = len(saved_bytes())
    assert str(check(savers.save_once, crash_points=2)) == (
        "Crash-safe checkpoint: failed, 1 finding\n\n"
        f"[save-fails-after-crash] after a save that was killed after {size - 1:,} of {size:,} bytes of "
        "checkpoint.tmp/state.pt, the next save() raises FileExistsError: [Errno 17] File exists: 'checkpoint.tmp'\n"
        "  cause: what the killed save has left is in the way of the next\n"
        "  fix: let save() remove or overwrite what an earlier one has left, before it begins"
    )


def test_files_that_nobody_removes():
    """A saver with a temporary name of its own each time leaves a file behind for each crash, which is noted."""

    def save(setup, path):
        temporary = f"{path}.{os.getpid()}"
        savers.write(savers.content(setup), temporary)
        os.replace(temporary, path)
        savers.sync_folder(os.path.dirname(path))

    size = len(saved_bytes())
    report = str(check(save, crash_points=2))
    assert re.sub(r"checkpoint\.\d+", "checkpoint.PID", report) == (
        "Crash-safe checkpoint: passed, 1 note\n\nNotes:\n"
        f"[litter] a save that was killed after {size - 1:,} of {size:,} bytes of checkpoint.PID leaves checkpoint.PID "
        f"({size - 1:,} bytes), which the next save() does not remove\n"
        "  fix: let save() remove what an earlier one has left, or use the same temporary name each time"
    )


def test_writer_that_claims_its_size():
    """A writer that claims the whole size at once is killed while it fills it."""
    (finding,) = check(savers.save_claiming, savers.load_claimed, crash_points=3).findings
    kinds = [point["kind"] for point in finding.evidence["points"]]
    assert finding.rule == "checkpoint-lost-in-crash"
    assert kinds[:2] == ["byte", "growth"]
    assert "killed after about 1," in finding.seen
    assert finding.cause == (
        "save() opens checkpoint for writing in place, which empties it before the new data are complete"
    )


def test_appended_line():
    """A journal whose last line is torn is told from one that is read up to its last whole line."""
    assert check(savers.save_journal, savers.load_journal, crash_points=3).ok
    (finding,) = check(savers.save_journal, savers.load_torn_journal, crash_points=3).findings
    assert finding.rule == "checkpoint-lost-in-crash"
    assert finding.seen == (
        "the checkpoint of step 2 is gone when the second save is killed\n"
        "killed after 7 of 10 bytes of checkpoint: load() raises FileNotFoundError: "
        "[Errno 2] No such file or directory: '4.'\n"
        "disk full after 7 of 10 bytes of checkpoint, save() raises OSError: [Errno 27] File too large: "
        "load() raises FileNotFoundError: [Errno 2] No such file or directory: '4.'"
    )
    assert finding.cause == "save() appends to checkpoint, and load() does not pass over the end that is cut off"
