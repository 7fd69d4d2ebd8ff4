"""Forked processes that report, raise, hang and die."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tl_resume._crash._child import run_child


def test_child_reports():
    """A child gives its report and what it printed, and draws the random numbers of its parent."""

    def action():
        print("out")
        print("err", file=sys.stderr)
        return {"threads": torch.get_num_threads(), "number": random.random(), "more": "x" * 200_000}

    ended = run_child(action, limit_s=20)
    assert ended.report == {"threads": 1, "number": random.random(), "more": "x" * 200_000}
    assert (ended.signal, ended.hung, ended.raised, ended.output) == (None, False, None, "out\nerr\n")


def test_child_raises():
    """An exception of a child is reported by type and first line, sys.exit too."""

    def action():
        raise KeyError("one\ntwo")

    assert run_child(action, limit_s=20).raised == r"KeyError: 'one\ntwo'"
    assert run_child(sys.exit, limit_s=20).raised == "SystemExit"


def test_child_that_hangs(tmp_path):
    """The time limit kills a child and what it has started."""

    def action():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (tmp_path / "pid").write_text(str(process.pid))
        threading.Event().wait()
        return {}

    ended = run_child(action, limit_s=1)
    assert (ended.report, ended.signal, ended.hung) == (None, signal.SIGKILL, True)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1000):  # it is init's to bury now
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.005)
    pytest.fail(f"the process {pid} lives on")
