"""Large pages for the memory of new tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_MIN_BYTES = 4 << 20  # below, there is hardly a whole page of 2 MB in it
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def use_huge_pages(tensor: Tensor) -> None:
    """Ask the system for large pages behind a new CPU tensor: its first touch, page by page, costs as much as reading.

    Only advice: where the system knows no such pages, nothing happens.
    """
    if _libc is None or tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() < _MIN_BYTES:
        return
    begin = tensor.untyped_storage().data_ptr()
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (begin + tensor.untyped_storage().nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
