"""The digest of what a batch or an input holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from tl_resume._format._chunks import memory_of

# Containers that hold themselves end here.
_MAX_DEPTH = 32


def content_digest(*values: Any) -> str:
    """Digest everything that values hold, as xxh3 hex: of tensors and arrays the dtype, shape and bytes.

    Nothing is changed by it: no random number is drawn, no gradient is recorded, and nothing is kept. Tensors are read
    back from their device one by one. Of a tensor that cannot be read (in a CUDA graph's capture, a meta tensor) the
    dtype and shape count.

    Args:
        *values: Tensors, arrays, numbers, strings, containers and plain objects of them, nested.
    """
    digest = xxhash.xxh3_128()
    with torch.no_grad():
        _add(digest, values, 0, {})
    return digest.hexdigest()


def _add(digest: Any, value: Any, depth: int, objects: dict[int, Any]) -> None:
    """Add a value; ``objects`` are the plain objects met so far, by id."""
    digest.update(f"<{type(value).__qualname__}>".encode())
    if depth > _MAX_DEPTH:
        return
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, (str, bytes, bytearray)):
        digest.update(f"{len(value)}:".encode())
        digest.update(value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value))
    elif value is None or isinstance(value, (bool, int, float, complex)):
        digest.update(repr(value).encode())
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        digest.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:
            _add(digest, value.tolist(), depth + 1, objects)
        else:
            digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _add(digest, key, depth + 1, objects)
            _add(digest, value[key], depth + 1, objects)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}:".encode())
        _add_all(digest, value, depth, objects)
    elif isinstance(value, (set, frozenset)):
        _add_all(digest, sorted(map(content_digest, value)), depth, objects)
    elif not callable(value) and id(value) not in objects:
        objects[id(value)] = value
        _add(digest, dict(getattr(value, "__dict__", {})), depth + 1, objects)


def _add_all(digest: Any, values: Iterable[Any], depth: int, objects: dict[int, Any]) -> None:
    for value in values:
        _add(digest, value, depth + 1, objects)


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tensor.layout}".encode())
    try:
        digest.update(f"{tuple(tensor.shape)}".encode())
        parts = _parts(tensor.detach())
        if parts is not None:
            for part in parts:
                _add_tensor(digest, part)
            return
        if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(memory_of(plain))
    except torch.OutOfMemoryError:  # a RuntimeError too; batches that were not read must not pass for equal ones
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        # a tensor inside of a torch.func transformation, a subclass without storage: it cannot be read from here
        digest.update(b"unread")


def _parts(tensor: Any) -> list[torch.Tensor] | None:
    """Give the plain tensors that a tensor with another layout consists of; None for a plain one."""
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor.to_local()] if hasattr(tensor, "to_local") else None
