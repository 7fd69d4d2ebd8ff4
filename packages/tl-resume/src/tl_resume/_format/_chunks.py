"""The bytes of tensors, a chunk at a time, without a copy where they lie in order on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tl_resume._format._entry import contiguous_strides

CHUNK_BYTES = 8 << 20


def memory_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes; the tensor must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class HostCopies:
    """Bring pieces of tensors to the CPU through two buffers in turn, page-locked where that helps."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._turn = 0

    def chunks(self, stored: Any) -> Iterator[tuple[memoryview, Any]]:
        """Yield the bytes of a tensor (row-major) or of a buffer, each with what keeps them alive.

        A chunk is valid until the next but one is asked for.
        """
        if not isinstance(stored, Tensor):
            view = memoryview(stored)
            view = view if view.nbytes == 0 else view.cast("B")
            for begin in range(0, view.nbytes, CHUNK_BYTES):
                yield view[begin : begin + CHUNK_BYTES], stored
            return
        for piece in _pieces(stored.detach()):
            as_it_is = piece.device.type == "cpu" and piece.is_contiguous() and not (piece.is_conj() or piece.is_neg())
            host = piece if as_it_is else self._to_host(piece)
            yield memory_of(host), host

    def _to_host(self, piece: Tensor) -> Tensor:
        """Copy a piece, row-major and with its views resolved, into the buffer whose turn it is."""
        pinned = piece.device.type == "cuda"
        if not self._buffers or (pinned and not self._buffers[0].is_pinned()):
            self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._turn ^= 1
        storage = self._buffers[self._turn].untyped_storage()
        host = torch.empty(0, dtype=piece.dtype)
        host.set_(storage, 0, piece.shape, contiguous_strides(tuple(piece.shape)))
        return host.copy_(piece)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into pieces of at most ``CHUNK_BYTES`` whose row-major bytes, one after the other, are its own."""
    if tensor.numel() == 0:
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= CHUNK_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        step = CHUNK_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            yield flat[begin : begin + step]
    else:
        row_bytes = nbytes // tensor.shape[0]
        step = max(1, CHUNK_BYTES // row_bytes)
        for begin in range(0, tensor.shape[0], step):
            rows = tensor[begin : begin + step]
            if step == 1:
                yield from _pieces(tensor[begin])
            else:
                yield rows
