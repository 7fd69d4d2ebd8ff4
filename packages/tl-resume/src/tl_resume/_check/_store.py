"""Keeps the tensors of captured states off the device: small ones in memory, big ones in files; equal ones once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_IN_MEMORY_BYTES = 1 << 20


class Store:
    """A folder for big tensors, and the digests of all.

    Args:
        folder: an existing folder, removed by whoever made it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[bytes, Callable[[], Tensor]] = {}

    def keep(self, tensor: Tensor) -> tuple[Callable[[], Tensor], bytes]:
        """Keep a tensor's content; what was kept before with the same content is kept once."""
        host, digest = _digest(tensor)
        if digest not in self._kept:
            self._kept[digest] = self._load_of(host, tensor)
        return self._kept[digest], digest

    def mark(self, tensor: Tensor) -> tuple[None, bytes]:
        """Keep only a tensor's digest."""
        return None, _digest(tensor)[1]

    def _load_of(self, host: Tensor, tensor: Tensor) -> Callable[[], Tensor]:
        shape, dtype = tensor.shape, tensor.dtype
        if host.numel() < _IN_MEMORY_BYTES:
            kept = host.clone()
            return lambda: kept.clone().view(dtype).reshape(shape)
        path = self._folder / f"{len(self._kept)}.tensor"
        num_bytes = host.numel()
        with path.open("wb") as file:
            file.write(_bytes(host))
        return lambda: torch.from_file(str(path), size=num_bytes, dtype=torch.uint8).view(dtype).reshape(shape)


def _digest(tensor: Tensor) -> tuple[Tensor, bytes]:
    """Return a tensor's bytes (uint8, one dimension, on the CPU) and their digest, which tells dtypes and shapes apart."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    hashed = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hashed.update(_bytes(host))
    return host, hashed.digest()


def _bytes(host: Tensor) -> memoryview:
    """See the bytes of a CPU tensor of uint8 without copying them, and without numpy."""
    array = (ctypes.c_char * host.numel()).from_address(host.data_ptr()) if host.numel() else b""
    return memoryview(array).cast("B")
