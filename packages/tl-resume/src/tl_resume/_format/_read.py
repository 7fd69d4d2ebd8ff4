"""Reading a file, no more of it than is asked for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_resume._format._chunks import CHUNK_BYTES, memory_of
from tl_resume._format._decode import Decoder, numpy_dtype
from tl_resume._format._entry import TensorEntry, contiguous_strides, span
from tl_resume._format._errors import StateFileError
from tl_resume._format._header import MAX_HEADER_BYTES, new_digest, parse_header

_THREADS = min(4, os.cpu_count() or 1)
_PARALLEL_BYTES = 16 << 20  # below, starting threads costs more than they gain
_VERIFY_BYTES = 1 << 20  # fits the cache, so that the digest reads there what was just copied


class StateFile:
    """Read a file of ``save_training_state`` or ``write_state``.

    Opening reads and checks the header; tensors are read when asked for. Use as a context manager.

    Args:
        path: The file.

    Attributes:
        path: The file.
        version: The version of its format.
        tensors: The stored tensors by name, in file order.

    Raises:
        StateFileError: The file is damaged, of another kind, or of a newer version; the message names it.
        OSError: The file cannot be opened (``FileNotFoundError``, ``PermissionError``).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # O_NONBLOCK: opening a pipe must not wait for somebody to write to it
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if self.path.is_dir():
            raise StateFileError(f"{self.path} is a folder, not a file")
        self._descriptor = os.open(self.path, flags)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StateFileError(f"{self.path} is a device, pipe or socket, not a regular file")
        size = found.st_size
        start = self._read_bytes(0, min(8, size))
        if size < 8:
            raise StateFileError(f"{self.path} is no safetensors file: it has only {size} bytes")
        length = int.from_bytes(start, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise StateFileError(
                f"{self.path} is damaged, or no safetensors file: its header would have {length} bytes, "
                f"and the file has {size}"
            )
        self._data = 8 + length
        self._parsed = parse_header(self._read_bytes(8, length), size - self._data, self.path)
        self.version: int = self._parsed.version
        self.tensors: dict[str, TensorEntry] = self._parsed.tensors
        decoder = Decoder(self._parsed, self.path, lambda entry: entry, sparse=False)
        decoder.state()
        if unused := [name for name in self.tensors if name not in decoder.used]:
            raise StateFileError(f"{self.path} is damaged: nothing of its state is the tensor {unused[0]!r:.80}")

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read from it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def skeleton(self) -> Any:
        """Build the nested state with a ``TensorEntry`` in place of each tensor, array and long bytes.

        The same object in two places is the same entry; a sparse tensor is a dict of its parts.
        """
        return Decoder(self._parsed, self.path, lambda entry: entry, sparse=False).state()

    def state(self, *, device: str | torch.device = "cpu", verify: bool = True) -> Any:
        """Read the whole nested state; what was one object, or views of one memory, is so again.

        Args:
            device: Where the tensors go, one after the other.
            verify: Check the digests.

        Raises:
            StateFileError: A digest does not match.
        """
        return self.part(device=lambda entry: device, verify=verify)

    def part(
        self,
        *keys: Any,
        device: Callable[[TensorEntry], str | torch.device] = lambda entry: "cpu",
        verify: bool = True,
        ready: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Read what lies under the keys of nested dicts, as ``state()[key][key]`` would be.

        Args:
            keys: The keys, from the outermost dict.
            device: Gives the device for each tensor.
            verify: Check the digests.
            ready: Stored tensors by name that were read before, by ``read_many``.

        Raises:
            KeyError: There is no such key.
            StateFileError: A digest does not match.
        """
        bases: dict[str, Any] = dict(ready or {})

        def resolve(entry: TensorEntry) -> Any:
            if entry.kind != "tensor":
                return self.read(entry, verify=verify)
            if entry.name not in bases:
                bases[entry.name] = self.read(entry.name, device=device(entry), verify=verify)
            return bases[entry.name] if entry.whole else _view(bases[entry.name], entry)

        return Decoder(self._parsed, self.path, resolve, sparse=True).state(*keys)

    def read(self, which: str | TensorEntry, *, device: str | torch.device = "cpu", verify: bool = True) -> Any:
        """Read one tensor.

        Args:
            which: A name of ``tensors``, or an entry of the skeleton: a view is given as a view, an array as a numpy
                array, bytes as bytes.
            device: Where the tensor goes.
            verify: Check the digest.

        Returns:
            The tensor, array or bytes.

        Raises:
            KeyError: There is no tensor of this name.
            StateFileError: The digest does not match.
        """
        entry = self.tensors[which] if isinstance(which, str) else which
        if entry.kind == "bytes":
            return bytes(self._read_raw(entry, verify))
        if entry.kind == "array":
            return self._read_array(entry, verify)
        base = self.tensors[entry.name]
        made = torch.empty_strided(base.shape, base.strides, dtype=base.dtype, device=device)
        self.read_into(entry.name, made, verify=verify)
        return made if entry.whole else _view(made, entry)

    def read_many(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read stored tensors to the CPU, by several threads, and check their digests.

        Their memory is made by the calling thread, whose allocator has some that was used before.

        Raises:
            StateFileError: A digest does not match.
        """
        entries = [self.tensors[name] for name in names]
        made = {e.name: torch.empty_strided(e.shape, e.strides, dtype=e.dtype) for e in entries}
        with ThreadPoolExecutor(_THREADS, "tl-resume-read") as pool:
            for _ in pool.map(lambda name: self.read_into(name, made[name]), made):
                pass  # raises what a thread raised
        return made

    def read_into(self, name: str, tensor: Tensor, *, verify: bool = True) -> None:
        """Read a stored tensor into one that is there, of the same dtype and shape, on any device.

        Raises:
            StateFileError: The digest does not match; the tensor has been written to.
        """
        entry = self.tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape)
        target = tensor.detach()
        if target.device.type == "cpu" and target.is_contiguous() and not target.is_neg() and not target.is_conj():
            self._stream(entry, verify, memory_of(target))
            return
        row_major = (
            target if target.is_contiguous() else torch.empty(entry.shape, dtype=entry.dtype, device=target.device)
        )
        if target.device.type == "cpu":
            self._stream(entry, verify, memory_of(row_major))
        else:
            self._stream_to_device(entry, verify, row_major)
        if row_major is not target:
            target.copy_(row_major)

    def copy_into(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Copy an entry of the skeleton into a tensor of its dtype and shape, on any device; no digest is checked."""
        base = self.tensors[entry.name]
        if entry.whole:
            self.read_into(entry.name, tensor, verify=False)
        elif base.strides == contiguous_strides(base.shape):
            # only the bytes of the view: a model whose parameters lie in one buffer has many views of it
            length = span(entry.shape, entry.strides)
            memory = torch.empty(length, dtype=entry.dtype)
            self._fill(self._begin(base) + entry.offset, memory_of(memory))
            tensor.detach().copy_(memory.as_strided(entry.shape, entry.strides))
        else:
            tensor.detach().copy_(self.read(entry, verify=False))

    def damaged(
        self, names: Iterable[str] | None = None, *, advance: Callable[[int], None] = lambda nbytes: None
    ) -> list[str]:
        """Name the stored tensors whose digest does not match, reading them with constant memory.

        Args:
            names: Those to read; None for all.
            advance: Called with the bytes of each tensor that has been read.
        """
        entries = [self.tensors[name] for name in (self.tensors if names is None else names)]
        wrong = []
        with ThreadPoolExecutor(_THREADS, "tl-resume-verify") as pool:
            digests = pool.map(lambda entry: self._digest(entry, None), entries)
            for entry, digest in zip(entries, digests, strict=True):
                if digest != entry.digest:
                    wrong.append(entry.name)
                advance(entry.nbytes)
        return wrong

    def _stream(self, entry: TensorEntry, verify: bool, into: memoryview) -> None:
        if not verify and into.nbytes < _PARALLEL_BYTES:
            self._fill(self._begin(entry), into)
        elif not verify:
            begin, step = self._begin(entry), -(-into.nbytes // _THREADS)
            with ThreadPoolExecutor(_THREADS, "tl-resume-read") as pool:
                parts = range(0, into.nbytes, step)
                for _ in pool.map(lambda first: self._fill(begin + first, into[first : first + step]), parts):
                    pass  # raises what a part raised
        elif self._digest(entry, into) != entry.digest:
            raise self._differs(entry)

    def _stream_to_device(self, entry: TensorEntry, verify: bool, target: Tensor) -> None:
        flat = target.view(-1)
        step = CHUNK_BYTES // max(flat.element_size(), 1)
        pinned = target.device.type == "cuda"
        buffer = torch.empty(min(step, flat.numel()), dtype=entry.dtype, pin_memory=pinned)
        digest = new_digest()
        begin = self._begin(entry)
        for first in range(0, flat.numel(), step):
            part = buffer[: min(step, flat.numel() - first)]
            memory = memory_of(part)
            self._fill(begin, memory)
            begin += memory.nbytes
            if verify:
                digest.update(memory)
            flat[first : first + part.numel()].copy_(part)
        if verify and digest.hexdigest() != entry.digest:
            raise self._differs(entry)

    def _differs(self, entry: TensorEntry) -> StateFileError:
        return StateFileError(f"{self.path} is damaged: the bytes of {entry.name!r} are not those that were written")

    def _digest(self, entry: TensorEntry, into: memoryview | None) -> str:
        """Digest the bytes of a tensor; they are put into a buffer, or seen only."""
        digest = new_digest()
        begin = self._begin(entry)
        seen = memoryview(bytearray(min(_VERIFY_BYTES, entry.nbytes))) if into is None else into
        for first in range(0, entry.nbytes, _VERIFY_BYTES):
            size = min(_VERIFY_BYTES, entry.nbytes - first)
            part = seen[:size] if into is None else seen[first : first + size]
            self._fill(begin + first, part)
            digest.update(part)
        return str(digest.hexdigest())

    def _read_raw(self, entry: TensorEntry, verify: bool) -> bytearray:
        data = bytearray(entry.nbytes)
        self._stream(entry, verify, memoryview(data))
        return data

    def _read_array(self, entry: TensorEntry, verify: bool) -> Any:
        dtype = numpy_dtype(entry.array, self.path)
        import numpy

        data = self._read_raw(entry, verify)
        flat = numpy.frombuffer(data, dtype) if data else numpy.empty(0, dtype)
        array = flat.reshape(entry.array_shape)
        return numpy.asfortranarray(array) if entry.array_order == "F" else array

    def _begin(self, entry: TensorEntry) -> int:
        return self._data + self._parsed.begins[entry.name]

    def _read_bytes(self, begin: int, length: int) -> bytes:
        data = bytearray(length)
        self._fill(begin, memoryview(data))
        return bytes(data)

    def _fill(self, begin: int, into: memoryview) -> None:
        while into.nbytes:
            got = os.preadv(self._descriptor, [into], begin)
            if got == 0:
                raise StateFileError(f"{self.path} is damaged: it became shorter while it was read")
            begin, into = begin + got, into[got:]


def _view(base: Tensor, entry: TensorEntry) -> Tensor:
    """Make the view of a restored tensor that an entry describes."""
    view = torch.empty(0, dtype=entry.dtype, device=base.device)
    begin = base.storage_offset() * base.element_size() + entry.offset
    return view.set_(base.untyped_storage(), begin // view.element_size(), entry.shape, entry.strides)
