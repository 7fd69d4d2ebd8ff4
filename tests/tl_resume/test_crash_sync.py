"""What was synced before it was put in place: read from a trace, and seen in the page cache."""

import os

import pytest

from tl_resume._crash import _pages, _sync
from tl_resume._crash._child import run_child
from tl_resume._crash._pages import unsynced_pages
from tl_resume._crash._sync import Tracer, unsynced_in_trace

WRITE = "7 write(3</w/new>, ..., 10) = 10"
SYNC = "7 fsync(3</w/new>) = 0"
RENAME = 'rename("/w/new", "/w/old") = 0'
FOLDER = "7 fsync(4</w>) = 0"


@pytest.mark.parametrize(
    ("lines", "files", "folders"),
    [
        ([WRITE, SYNC, f"7 {RENAME}", FOLDER], {}, {}),
        ([WRITE, f"7 {RENAME}", FOLDER], {"old": "new was renamed to old"}, {}),
        ([WRITE, f"7 {RENAME}", "7 fsync(3</w/old>) = 0", FOLDER], {"old": "new was renamed to old"}, {}),
        ([WRITE, SYNC, f"7 {RENAME}"], {}, {".": "new was renamed to old"}),
        ([WRITE, SYNC, FOLDER, f"7 {RENAME}"], {}, {".": "new was renamed to old"}),
        ([SYNC, WRITE, f"7 {RENAME}", FOLDER], {"old": "new was renamed to old"}, {}),
        (
            [WRITE, "7 fsync(3</w/new>) = -1 EIO (Input/output error)", f"7 {RENAME}", FOLDER],
            {"old": "new was renamed to old"},
            {},
        ),
        ([WRITE, "7 sync() = 0", f"7 {RENAME}", "7 syncfs(4</w>) = 0"], {}, {}),
        ([WRITE], {"new": ""}, {}),
        ([WRITE, '7 unlink("/w/new") = 0'], {}, {}),
        ([WRITE, '7 unlinkat(4</w>, "new", 0) = 0'], {}, {}),
        (["7 write(3</elsewhere/new>, ..., 10) = 10"], {}, {}),
        (['7 openat(AT_FDCWD</>, "/w/new", O_WRONLY|O_CREAT|O_DSYNC, 0666) = 3</w/new>', WRITE], {}, {}),
        (["7 mmap(NULL, 10, PROT_READ|PROT_WRITE, MAP_SHARED, 3</w/new>, 0) = 0x7f00"], {"new": ""}, {}),
        (["7 mmap(NULL, 10, PROT_READ, MAP_SHARED, 3</w/new>, 0) = 0x7f00"], {}, {}),
        (["7 copy_file_range(3</w/old>, NULL, 4</w/new>, NULL, 10, 0) = 10"], {"new": ""}, {}),
        (["7 sendfile(4</w/new>, 3</w/old>, NULL, 10) = 10"], {"new": ""}, {}),
        (['7 truncate("/w/new", 3) = 0'], {"new": ""}, {}),
        (['7 symlinkat("step_4", 4</w>, "latest") = 0'], {}, {".": "the symbolic link latest was made"}),
        (
            ["7 write(3</w/aside/a>, ..., 1) = 1", '7 renameat(4</w>, "aside", 4</w>, "step") = 0', FOLDER],
            {"step/a": "aside was renamed to step"},
            {},
        ),
        (  # a backup link of what was not synced; the file itself is synced later
            [WRITE, '7 linkat(4</w>, "new", 4</w>, "bak", 0) = 0', SYNC, FOLDER],
            {"bak": "new was linked to bak"},
            {},
        ),
        (  # renamed twice: what counts is the last rename
            [
                WRITE,
                '7 rename("/w/new", "/w/mid") = 0',
                "7 fsync(3</w/mid>) = 0",
                '7 rename("/w/mid", "/w/old") = 0',
                FOLDER,
            ],
            {},
            {},
        ),
        (  # two threads: the sync has ended before the rename begins
            [
                "7 fsync(3</w/new> <unfinished ...>",
                WRITE.replace("7", "8", 1),
                "7 <... fsync resumed>) = 0",
                f"8 {RENAME}",
                FOLDER,
            ],
            {},
            {},
        ),
        (["7 write(3</w/n\\303\\266>, ..., 10) = 10"], {"nö": ""}, {}),
        (["7 +++ exited with 0 +++", "not a line of strace", "7 write(1<pipe:[9]>, ..., 4) = 4"], {}, {}),
    ],
)
def test_trace(lines, files, folders):
    """Files not synced before their rename, and folders not synced after it, are read from a trace."""
    assert unsynced_in_trace(lines, "/w") == (files, folders)


def write_unsynced(folder):
    descriptor = os.open(f"{folder}/new", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"data")
    os.rename(f"{folder}/new", f"{folder}/old")
    os.close(descriptor)
    return {}


@pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")
def test_tracer(tmp_path):
    """A child that waits is traced from its first act on."""
    tracer = Tracer(str(tmp_path / "trace"))
    run_child(lambda: write_unsynced(tmp_path), limit_s=20, prepare=tracer.attach)
    assert unsynced_in_trace(tracer.lines(), str(tmp_path)) == (
        {"old": "new was renamed to old"},
        {".": "new was renamed to old"},
    )


def test_tracer_that_may_not(tmp_path, monkeypatch):
    """Where strace is not allowed to trace, the child runs all the same and there is no trace."""
    refused = tmp_path / "strace"
    refused.write_text("#!/bin/sh\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(_sync.shutil, "which", lambda name: str(refused))
    tracer = Tracer(str(tmp_path / "trace"))
    ended = run_child(lambda: write_unsynced(tmp_path), limit_s=20, prepare=tracer.attach)
    assert ended.report == {}
    assert tracer.lines() is None


def test_pages(tmp_path):
    """Pages that are not on the disk are counted where the file system shows them, and none are left by a sync."""
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write(b"x" * 3 * 4096)
        file.flush()
        if not _pages.sees_unsynced_pages(tmp_path):
            pytest.skip("the page cache is not shown here")
        assert unsynced_pages(path) == 3
        os.fsync(file.fileno())
    assert unsynced_pages(path) == 0
    assert os.listdir(tmp_path) == ["file"]


def test_pages_elsewhere(tmp_path, monkeypatch):
    """Systems other than Linux do not show the page cache."""
    monkeypatch.setattr(_pages.sys, "platform", "elsewhere")
    assert not _pages.sees_unsynced_pages(tmp_path)
