"""Keeps the tensors of captured states off the device: small ones in memory, big ones in files; equal ones once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from tl_resume._format._chunks import memory_of

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
            self._kept[digest] = self._written(host, digest, tensor)
        return self._kept[digest], digest

    def mark(self, tensor: Tensor) -> tuple[None, bytes]:
        """Keep only a tensor's digest."""
        return None, _digest(tensor)[1]

    def _written(self, host: Tensor, digest: bytes, tensor: Tensor) -> Callable[[], Tensor]:
        if host.numel() < _IN_MEMORY_BYTES:
            return _InMemory(host.clone(), tensor.dtype, tensor.shape)
        path = self._folder / digest.hex()
        path.write_bytes(memory_of(host))
        return _InFile(str(path), host.numel(), tensor.dtype, tensor.shape)


@dataclass(frozen=True)
class _InMemory:
    """Gives a copy of a tensor back. Can be pickled, as a result of a process that was spawned for the check."""

    content: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        return self.content.clone().view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class _InFile:
    """Reads a tensor from its file, page by page as it is looked at."""

    path: str
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        content = torch.from_file(self.path, size=self.num_bytes, dtype=torch.uint8)
        return content.view(self.dtype).reshape(self.shape)


def _digest(tensor: Tensor) -> tuple[Tensor, bytes]:
    """Return a tensor's bytes (uint8, one dimension, on the CPU), and a digest of them, its dtype and its shape."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    hashed = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hashed.update(memory_of(host))
    return host, hashed.digest()
