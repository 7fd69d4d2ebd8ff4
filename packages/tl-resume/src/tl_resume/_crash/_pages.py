"""Whether the pages of a file are on the disk."""

from __future__ import annotations

import ctypes
import sys
import tempfile

_CACHESTAT = 451  # the number of the system call, on every architecture since Linux 6.5


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def unsynced_pages(path: str) -> int | None:
    """How many pages of a file are not on the disk yet; None where this cannot be seen."""
    if sys.platform != "linux":
        return None
    pages = _Pages()
    with open(path, "rb") as file:
        everything = _Range(0, 0)
        failed = ctypes.CDLL(None, use_errno=True).syscall(
            _CACHESTAT, file.fileno(), ctypes.byref(everything), ctypes.byref(pages), 0
        )
    return None if failed else int(pages.dirty + pages.writeback)


def sees_unsynced_pages(folder: str) -> bool:
    """Whether pages that are not on the disk yet can be seen in a folder: a tmpfs and an overlayfs hide them."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="control") as file:
        file.write(b"unsynced" * 1024)
        file.flush()
        return bool(unsynced_pages(file.name))
