"""Writing past the page cache, two blocks at a time."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

BLOCK_BYTES = 4096  # what offsets, sizes and memory must be multiples of
_BUFFER_BYTES = 4 << 20
_BUFFERS = 3  # two on their way, one being filled


def direct_writer(descriptor: int, begin: int) -> DirectWriter | None:
    """Make a writer that goes on at a multiple of ``BLOCK_BYTES``; None where the file system or system has no such."""
    if not hasattr(os, "O_DIRECT") or begin % BLOCK_BYTES:
        return None
    try:
        _set_direct(descriptor, True)
    except OSError:
        return None
    return DirectWriter(descriptor, begin)


def _set_direct(descriptor: int, on: bool) -> None:
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


class DirectWriter:
    """Write bytes one after the other; all is written when the block is left without an exception.

    Args:
        descriptor: The file, open for direct writing; what is written to it afterwards is not direct.
        begin: Where in the file to begin.
    """

    def __init__(self, descriptor: int, begin: int) -> None:
        self._descriptor, self._position = descriptor, begin
        self._memory = [mmap.mmap(-1, _BUFFER_BYTES) for _ in range(_BUFFERS)]  # memory of whole pages
        self._pending: list[Future[None] | None] = [None] * _BUFFERS
        self._turn, self._filled = 0, 0
        self._pool = ThreadPoolExecutor(_BUFFERS - 1, "tl-resume-write")

    def write(self, data: memoryview) -> None:
        """Take bytes; those of a full buffer are on their way when this returns."""
        while data.nbytes:
            size = min(data.nbytes, _BUFFER_BYTES - self._filled)
            memoryview(self._memory[self._turn])[self._filled : self._filled + size] = data[:size]
            self._filled += size
            data = data[size:]
            if self._filled == _BUFFER_BYTES:
                self._send()

    def _send(self) -> None:
        block = memoryview(self._memory[self._turn])[: self._filled]
        self._pending[self._turn] = self._pool.submit(self._write_at, block, self._position)
        self._position += self._filled
        self._turn, self._filled = (self._turn + 1) % _BUFFERS, 0
        self._wait(self._turn)

    def _wait(self, turn: int) -> None:
        pending, self._pending[turn] = self._pending[turn], None
        if pending is not None:
            pending.result()

    def _write_at(self, data: memoryview, position: int) -> None:
        while data.nbytes:
            try:
                written = os.pwrite(self._descriptor, data, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _set_direct(self._descriptor, False)  # a file system that takes the flag, but not the writing
                written = os.pwrite(self._descriptor, data, position)
            data, position = data[written:], position + written

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for turn in range(_BUFFERS):
                with suppress(*((Exception,) if error is not None else ())):  # the first error is the one to tell
                    self._wait(turn)
        finally:
            self._pool.shutdown()
            _set_direct(self._descriptor, False)
        if error is None:  # what is left is no whole block
            self._write_at(memoryview(self._memory[self._turn])[: self._filled], self._position)
