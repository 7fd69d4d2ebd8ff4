"""A forked process that does one thing, reports it, and may die or hang while doing so."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import selectors
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tl_resume._crash._sync import let_trace

_POLL_S = 0.02
_MESSAGE_CHARS = 160
_OUTPUT_BYTES = 4000  # of what a child printed, the end is kept


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Args:
        report: What its action returned, or ``{"raised": "RuntimeError: ..."}``; None when it died before it could say.
        signal: The signal that killed it, or None.
        hung: It was killed here, for it did not end within the time limit.
        output: The end of what it printed.
        duration_s: How long it took.
        limit_s: How long it was given.
    """

    report: dict[str, Any] | None
    signal: int | None
    hung: bool
    output: str
    duration_s: float
    limit_s: float

    @property
    def raised(self) -> str | None:
        """The exception that left the action, as text, or None."""
        return None if self.report is None else self.report.get("raised")


def run_child(
    action: Callable[[], Mapping[str, Any]],
    *,
    limit_s: float,
    prepare: Callable[[int], None] | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> Ended:
    """Do something in a forked process and wait for its end.

    The child has one torch thread (a parallel region hangs in a process that was forked after torch has computed), a
    process group of its own, default signals, and its output in a pipe. It ends without cleaning up: no handler of
    pytest, coverage or atexit runs in it. Whatever it started is killed with it.

    Args:
        action: What the child does; returns what JSON can hold.
        limit_s: Seconds after which the child is killed.
        prepare: Called in this process with the child's id before the child begins.
        kill_when: Asked again and again in this process; the child is killed when it says True.
    """
    pipes = [os.pipe() for _ in range(3)]
    (gate_read, gate_write), (output_read, output_write), (report_read, report_write) = pipes
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # what the parent has not written yet is not the child's to write
            stream.flush()
    numbers = random.getstate()
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork of a process with threads; the child computes with one thread
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        random.setstate(numbers)  # python seeds its generator anew in a forked process
        for end in (gate_write, output_read, report_read):
            os.close(end)
        _be_child(action, gate_read, output_write, report_write)
    for end in (gate_read, output_write, report_write):
        os.close(end)
    started = time.monotonic()
    try:
        if prepare is not None:
            prepare(pid)
        os.write(gate_write, b"g")
        status, chunks, hung = _wait(pid, output_read, report_read, started + limit_s, kill_when)
    except BaseException:
        _kill(pid)
        os.waitpid(pid, 0)
        raise
    finally:
        for end in (gate_write, output_read, report_read):
            os.close(end)
    report = json.loads(chunks[report_read]) if chunks[report_read].endswith(b"}") else None
    output = bytes(chunks[output_read][-_OUTPUT_BYTES:]).decode(errors="replace")
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return Ended(report, number, hung, output, time.monotonic() - started, limit_s)


def _describe_error(error: BaseException) -> str:
    """The type and the first line of the message of an exception."""
    text = textwrap.shorten(str(error).strip().split("\n")[0], _MESSAGE_CHARS, placeholder=" ...")
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _be_child(action: Callable[[], Mapping[str, Any]], gate: int, output: int, report: int) -> None:
    import resource  # POSIX only, as fork

    said: Mapping[str, Any] = {}
    try:
        os.setsid()
        let_trace()
        gc.freeze()  # a collection would touch, and so copy, the pages of all that the parent holds
        for number in (signal.SIGINT, signal.SIGTERM):
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()  # it would write to the parent's terminal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.settrace(None)
        sys.setprofile(None)
        _redirect(output)
        torch.set_num_threads(1)
        if os.read(gate, 1) != b"g":  # the parent is gone
            os._exit(1)
        said = action()
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent is told
        said = {"raised": _describe_error(error)}
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            data = memoryview(json.dumps(dict(said)).encode())
            while data:
                data = data[os.write(report, data) :]
        finally:
            os._exit(0)


def _redirect(output: int) -> None:
    """Send what the child prints to the pipe: pytest's captured streams belong to the parent."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _wait(
    pid: int, output: int, report: int, deadline: float, kill_when: Callable[[], bool] | None
) -> tuple[int, dict[int, bytearray], bool]:
    chunks = {output: bytearray(), report: bytearray()}
    hung = False
    with selectors.DefaultSelector() as selector:
        for end in chunks:
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                hung = True
                _kill(pid)
                status = os.waitpid(pid, 0)[1]
                break
            if kill_when is not None and kill_when():
                _kill(pid)
            if not selector.get_map():  # both pipes are closed: the child is about to end
                time.sleep(_POLL_S / 20)
                continue
            for key, _ in selector.select(0 if kill_when is not None else _POLL_S):
                if not _drain(key.fd, chunks[key.fd]):
                    selector.unregister(key.fd)
    _kill(pid)  # what the child has started and left
    for end, chunk in chunks.items():
        _drain(end, chunk)
    return status, chunks, hung


def _drain(end: int, chunk: bytearray) -> bool:
    """Read what is there; False when the other end is closed."""
    while True:
        try:
            data = os.read(end, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        chunk += data


def _kill(pid: int) -> None:
    """Kill the child and its process group, which is the child's own once it has begun."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
