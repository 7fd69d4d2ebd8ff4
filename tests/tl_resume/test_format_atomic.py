"""Saving replaces a file at once, and leaves nothing behind, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_resume._crash._child import run_child
from tl_resume._format import StateFile, _replace, write_state

OLD = {"epoch": 1, "w": torch.ones(10)}
NEW = {"epoch": 2, "w": torch.zeros(10), "b": torch.ones(3)}


def _epoch(path: Path) -> int:
    with StateFile(path) as file:
        assert file.damaged() == []
        return int(file.part("epoch"))


class Calls:
    """Record what is done to the file system, and make the n-th call fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.names: list[str] = []
        self._fail_at = fail_at
        for name in ("open", "write", "fsync", "replace", "close"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if name != "open" or os.path.dirname(os.fspath(args[0])):  # not what the libraries open meanwhile
                shown = name
                if name == "fsync":
                    shown = "fsync folder" if os.path.isdir(f"/proc/self/fd/{args[0]}") else "fsync file"
                self.names.append(shown)
                if self._fail_at is not None and len(self.names) - 1 == self._fail_at and name != "close":
                    raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **options)

        return call


def _order(calls: list[str]) -> bool:
    """Tell whether the data were synced before the name, and the name after it was there."""
    if not {"fsync file", "replace", "fsync folder"} <= set(calls):
        return False
    last_write = max(index for index, name in enumerate(calls) if name == "write")
    return last_write < calls.index("fsync file") < calls.index("replace") < calls.index("fsync folder")


def test_the_data_are_on_the_disk_before_the_name(monkeypatch, tmp_path):
    """File, rename, folder: in this order."""
    calls = Calls(monkeypatch)
    write_state(tmp_path / "state", OLD)
    assert _order(calls.names)


@pytest.mark.parametrize("missing", ["file", "folder", "all"])
def test_a_wrong_order_would_be_seen(missing, monkeypatch, tmp_path):
    """The check of the order goes off when a sync is left out."""
    calls = Calls(monkeypatch)
    if missing == "folder":
        monkeypatch.setattr(_replace, "_sync_folder", lambda folder: None)
    write_state(tmp_path / "state", OLD, durable=missing == "folder")
    if missing == "file":
        _replace._sync_folder(tmp_path)
    assert not _order(calls.names)


def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path):
    """Whichever of the calls fails, the error names the path, and the folder has the old file (or the new one)."""
    path = tmp_path / "state"
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        write_state(path, NEW)
    replaced = calls.names.index("replace")
    for at, name in enumerate(calls.names):
        if name == "close":
            continue
        write_state(path, OLD)
        with monkeypatch.context() as patch:
            Calls(patch, fail_at=at)
            with pytest.raises(OSError) as caught:
                write_state(path, NEW)
        assert caught.value.errno == errno.ENOSPC
        assert at > replaced or caught.value.filename == str(path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
        assert _epoch(path) == (2 if at > replaced else 1)
    assert len(calls.names) > 6


def test_an_interrupt_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path):
    """Not only errors are cleaned up after."""
    path = tmp_path / "state"
    write_state(path, OLD)

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_state(path, NEW)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert _epoch(path) == 1


def _killed_save(path: Path) -> None:
    """Save, and die in the second write."""
    real, count = os.write, 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal count
        count += 1
        if count == 2:
            real(descriptor, data[:5])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, data)

    os.write = write  # type: ignore[assignment]
    write_state(path, {"epoch": 2, "a": torch.ones(4), "b": torch.ones(4)})


def test_a_killed_save_leaves_the_old_file_and_the_next_one_cleans_up(tmp_path):
    """The litter of a process that is gone is removed; that of another target and of a live process stays."""
    path = tmp_path / "state"
    write_state(path, OLD)
    assert run_child(lambda: _killed_save(path), limit_s=30).signal == signal.SIGKILL
    litter = [entry.name for entry in tmp_path.iterdir() if entry.name != "state"]
    assert len(litter) == 1
    assert _epoch(path) == 1
    machine = _replace._machine()
    live = tmp_path / f".state.{machine}-{os.getppid()}-0.tl-resume.tmp"
    other = tmp_path / f".state.b.{machine}-{2**22 + 1}-0.tl-resume.tmp"
    recent = tmp_path / ".state.ffffffff-1-0.tl-resume.tmp"
    old = tmp_path / ".state.ffffffff-2-0.tl-resume.tmp"
    for file in (live, other, recent, old):
        file.touch()
    os.utime(old, (0, 0))
    write_state(path, NEW)
    assert {entry.name for entry in tmp_path.iterdir()} == {"state", live.name, other.name, recent.name}
    assert _epoch(path) == 2


def test_a_save_that_runs_in_another_thread_keeps_its_temporary_file(tmp_path):
    """Two saves of one target at once both end, and the later one stays."""
    path = tmp_path / "state"
    with _replace.replacing(path, durable=False) as outer:
        os.write(outer, b"outer")
        write_state(path, NEW)
        assert _epoch(path) == 2
    assert path.read_bytes() == b"outer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_is_that_of_the_umask(mask, tmp_path):
    """A checkpoint can be read by whom the person lets read files."""
    before = os.umask(mask)
    try:
        write_state(tmp_path / "state", OLD)
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_link_is_kept_and_what_it_points_at_is_replaced(tmp_path):
    """last.safetensors may be a link to another folder, to a file that is there or not yet."""
    (tmp_path / "store").mkdir()
    link = tmp_path / "last"
    link.symlink_to("store/state")
    for state in (OLD, NEW):
        write_state(link, state)
        assert link.is_symlink()
        assert _epoch(tmp_path / "store" / "state") == state["epoch"]
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == ["state"]


def test_a_target_that_is_no_file_is_refused(tmp_path):
    """A folder, a pipe, a folder that is not there, a link to itself."""
    with pytest.raises(ValueError) as folder:
        write_state(tmp_path, OLD)
    assert str(folder.value) == f"path must name a file, but {tmp_path} is a folder: name a file in it"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError) as pipe:
        write_state(tmp_path / "pipe", OLD)
    assert str(pipe.value) == f"path must name a regular file, but {tmp_path}/pipe is a device, pipe or socket"
    with pytest.raises(FileNotFoundError) as missing:
        write_state(tmp_path / "a" / "b", OLD)
    assert str(missing.value) == f"[Errno 2] the folder to save in does not exist: '{tmp_path}/a'"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError) as loop:
        write_state(tmp_path / "loop", OLD)
    assert loop.value.errno == errno.ELOOP
    assert {entry.name for entry in tmp_path.iterdir()} == {"pipe", "loop"}


def test_a_long_name_can_be_saved(tmp_path):
    """The temporary name is not longer than a file system allows."""
    path = tmp_path / ("x" * 255)
    write_state(path, OLD)
    assert _epoch(path) == 1


_MEMORY = """
    import resource, sys, torch
    from tl_resume._format import StateFile, write_state
    from safetensors import safe_open
    target = sys.argv[1]
    write_state(target, {"small": torch.ones(10), "s": torch.ones(4).t()})  # everything is imported
    with StateFile(target) as file:
        file.state()
    turned = torch.ones(3500, 3500).t()
    state = {"b": [turned, torch.ones(6_000_000, dtype=torch.float64)]}
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    before = peak()
    write_state(target, state, durable=False)
    written = peak() - before
    del state, turned
    with StateFile(target) as file:
        file.damaged()
        checked = peak() - before
        for name in file.tensors:
            file.read(name)
    print(written, checked)
"""


def test_saving_needs_no_second_state(tmp_path):
    """A state of two tensors of 48 MB is saved, and checked, with less than 40 MB more than it takes itself."""
    script = [sys.executable, "-c", textwrap.dedent(_MEMORY), tmp_path / "state"]
    ran = subprocess.run(script, check=True, capture_output=True, text=True)
    written, checked = map(int, ran.stdout.split())
    assert written < 40
    assert checked < 40
