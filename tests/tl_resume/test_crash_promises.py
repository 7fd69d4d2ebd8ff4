"""What the crash check leaves as it was, and how often it runs what it is given."""

import importlib.util
import os
import random
import resource
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from tl_resume import check_checkpoint_crash_safe
from tl_resume._crash import _run

spec = importlib.util.spec_from_file_location("crash_savers", Path(__file__).with_name("crash_savers.py"))
savers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(savers)


def check(save, *, step=savers.step):
    return check_checkpoint_crash_safe(
        savers.make_setup, savers.make_data(), step, save=save, load=savers.load, crash_points=1
    )


def children():
    """The child processes of this one, dead ones that are not waited for included."""
    command = ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in listed if not line.endswith(" ps")]


def test_children_are_seen():
    """The list that the next tests compare holds a process that was not waited for."""
    before = children()
    pid = os.spawnvp(os.P_NOWAIT, "true", ["true"])
    assert [line.split()[0] for line in children() if line not in before] == [str(pid)]
    os.waitpid(pid, 0)


def test_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """Random numbers, folder, limits, signals, children, threads and temporary files are what they were."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = torch.serialization._open_zipfile_writer
    random.seed(7)
    torch.manual_seed(7)

    def look():
        numbers = [signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD]
        return (
            random.getstate(),
            torch.get_rng_state().tolist(),
            os.getcwd(),
            resource.getrlimit(resource.RLIMIT_FSIZE),
            resource.getrlimit(resource.RLIMIT_CORE),
            [signal.getsignal(number) for number in numbers],
            torch.get_num_threads(),
            threading.enumerate(),
            len(os.listdir("/dev/fd")),
            os.listdir(tmp_path),
            children(),
        )

    before = look()
    check(savers.save_in_place)
    assert look() == before
    assert torch.serialization._open_zipfile_writer is writer


def test_in_another_thread():
    """The check works in a thread that is not the main one."""
    reports = []
    thread = threading.Thread(target=lambda: reports.append(check(savers.save_in_place)))
    thread.start()
    thread.join()
    assert [finding.rule for finding in reports[0].findings] == ["checkpoint-lost-in-crash"]


def test_setup_is_trained_once(monkeypatch):
    """The loop runs once, and only the first save is done in this process."""
    calls = []

    def step(setup, batch):
        calls.append(setup.step_index)
        return savers.step(setup, batch)

    def save(setup, path):
        calls.append("save")
        savers.save_aside(setup, path)

    check(save, step=step)
    assert calls == [0, 1, "save", 2, 3]


def test_interrupt(tmp_path, monkeypatch):
    """An interrupt leaves no child and no temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_run, "explain", interrupt)
    before = children()
    with pytest.raises(KeyboardInterrupt):
        check(savers.save_in_place)
    assert os.listdir(tmp_path) == []
    assert children() == before
