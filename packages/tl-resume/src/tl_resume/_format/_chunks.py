"""The bytes of tensors, a chunk at a time, without a copy where they lie in order on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
            if piece.device.type == "cpu":
                whole = piece.contiguous().resolve_conj().resolve_neg()
                yield memory_of(whole), whole
            else:
                host = self._to_host(piece.contiguous().resolve_conj().resolve_neg())
                yield memory_of(host), host

    def _to_host(self, piece: Tensor) -> Tensor:
        if piece.numel() * piece.element_size() > CHUNK_BYTES or piece.device.type != "cuda":
            return piece.cpu()
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn ^= 1
        size = piece.numel() * piece.element_size()
        host = torch.empty(0, dtype=piece.dtype).set_(
            self._buffers[self._turn].untyped_storage(), 0, piece.shape, piece.stride()
        )
        assert host.numel() * host.element_size() == size
        host.copy_(piece)
        return host


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
