"""Two tensors compared a chunk at a time: equal bytes cost a read, figures are made of what differs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_resume._diff import _stored
from tl_resume._diff._stored import StoredTensor

AnyTensor = Tensor | StoredTensor
Scalar = bool | int | float | complex
# Exact in float32: whether two of these differ shows in their float32 difference.
_SINGLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass
class Figures:
    """Say how two tensors of one shape differ.

    Attributes:
        num_elements: Elements of each.
        num_different: Those that differ beyond the tolerance.
        num_within: Those that differ within it.
        max_abs: The largest absolute difference, None where none is a number.
        index: Where that is.
        values: Both values there.
        max_rel: The largest difference relative to the second value, where that is finite and not 0.
        nan_a: Elements that are NaN in the first tensor only.
        nan_b: Elements that are NaN in the second tensor only.
    """

    num_elements: int = 0
    num_different: int = 0
    num_within: int = 0
    max_abs: float | None = None
    index: tuple[int, ...] | None = None
    values: tuple[Scalar, Scalar] | None = None
    max_rel: float | None = None
    nan_a: int = 0
    nan_b: int = 0


class Comparer:
    """Compare pairs of tensors, with two buffers that are used again and again.

    Args:
        rtol: Relative tolerance.
        atol: Absolute tolerance: elements differ beyond ``atol + rtol * abs(b)``.
    """

    def __init__(self, rtol: float, atol: float) -> None:
        self._rtol = rtol
        self._atol = atol
        self._buffers = bytearray(_stored.CHUNK_BYTES), bytearray(_stored.CHUNK_BYTES)
        self._views = tuple(memoryview(buffer) for buffer in self._buffers)
        self._tensors = tuple(torch.frombuffer(buffer, dtype=torch.uint8) for buffer in self._buffers)

    def compare(self, a: AnyTensor, b: AnyTensor) -> Figures:
        """Compare two tensors of one shape, of any element types.

        Args:
            a: A tensor on any device, or one in a file.
            b: The other one.

        Returns:
            The figures; equal means equal in value, with NaN equal to NaN and -0.0 equal to 0.0.
        """
        total = math.prod(a.shape)
        figures = Figures(num_elements=total)
        width = max(a.dtype.itemsize, b.dtype.itemsize)
        step = len(self._buffers[0]) // width
        flat_a, flat_b = _flat(a), _flat(b)
        for start in range(0, total, step):
            count = min(step, total - start)
            if a.dtype == b.dtype and isinstance(flat_a, StoredTensor) and isinstance(flat_b, StoredTensor):
                if self._same_bytes(flat_a, flat_b, start * width, count * width):
                    continue
                part_a, part_b = self._buffered(0, a.dtype, count), self._buffered(1, b.dtype, count)
            else:
                part_a, part_b = self._part(flat_a, 0, start, count), self._part(flat_b, 1, start, count)
                if part_a.dtype == part_b.dtype and _equal_bytes(part_a, part_b):
                    continue
            self._add(figures, part_a, part_b, start, tuple(a.shape))
        return figures

    def _same_bytes(self, a: StoredTensor, b: StoredTensor, start: int, num_bytes: int) -> bool:
        """Read a chunk of both, and say whether its bytes are the same."""
        for tensor, view in zip((a, b), self._views, strict=True):
            tensor.read_into(view[:num_bytes], start)
        if num_bytes == len(self._buffers[0]):
            # bytearrays are compared by memcmp, memoryviews element by element
            return self._buffers[0] == self._buffers[1]
        return bytes(self._views[0][:num_bytes]) == bytes(self._views[1][:num_bytes])

    def _buffered(self, side: int, dtype: torch.dtype, count: int) -> Tensor:
        return self._tensors[side][: count * dtype.itemsize].view(dtype)

    def _part(self, tensor: AnyTensor, side: int, start: int, count: int) -> Tensor:
        """Return a chunk on the CPU."""
        if isinstance(tensor, StoredTensor):
            size = tensor.dtype.itemsize
            tensor.read_into(self._views[side][: count * size], start * size)
            return self._buffered(side, tensor.dtype, count)
        return tensor[start : start + count].contiguous().cpu()

    def _add(self, figures: Figures, a: Tensor, b: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """Add a chunk whose bytes differ to the figures."""
        exact = self._rtol == 0.0 and self._atol == 0.0
        single = exact and a.dtype in _SINGLE and b.dtype in _SINGLE
        wide_a, wide_b = (tensor.float() if single else _widened(tensor) for tensor in (a, b))
        gap = (wide_a - wide_b).abs()
        size_b = wide_b.abs()
        if not exact or _is_long(a) or _is_long(b) or not math.isfinite(gap.max()):
            gap = self._judged(figures, a, b, gap, size_b)
        else:
            figures.num_different += int(gap.count_nonzero())
        largest = float(gap.max())
        if largest > 0 and (figures.max_abs is None or largest >= figures.max_abs):
            self._note_largest(figures, a, b, gap, start, shape)
        # 0 / 0 is NaN and x / 0 infinite: neither tells anything, nor does what is infinite itself
        relative = float((gap / size_b).nan_to_num_(0.0, 0.0).max())
        if relative > 0 and (figures.max_rel is None or relative > figures.max_rel):
            figures.max_rel = relative

    def _judged(self, figures: Figures, a: Tensor, b: Tensor, gap: Tensor, size_b: Tensor) -> Tensor:
        """Count what is equal, within the tolerance or different; return the gaps of what differs, elsewhere 0."""
        nan_a, nan_b = _is_nan(a), _is_nan(b)
        finite = gap.isfinite() & size_b.isfinite()
        equal = _equal_values(a, b) | (nan_a & nan_b)
        if _is_long(a) and _is_long(b):
            gap = gap.clamp_min(1.0)  # float64 rounds neighbours to one number
        within = ~equal & finite & (gap <= self._atol + self._rtol * size_b)
        different = ~(equal | within)
        figures.num_different += int(different.count_nonzero())
        figures.num_within += int(within.count_nonzero())
        figures.nan_a += int((nan_a & ~nan_b).count_nonzero())
        figures.nan_b += int((nan_b & ~nan_a).count_nonzero())
        return torch.where(different & ~gap.isnan(), gap, 0.0)

    def _note_largest(
        self, figures: Figures, a: Tensor, b: Tensor, gap: Tensor, start: int, shape: tuple[int, ...]
    ) -> None:
        where = int(gap.argmax())
        values = a[where].item(), b[where].item()
        distance = _distance(*values)
        if figures.max_abs is None or distance > figures.max_abs:
            figures.max_abs, figures.values = distance, values
            figures.index = _unravelled(start + where, shape)


def _flat(tensor: AnyTensor) -> AnyTensor:
    """Return a tensor as one dimension; only a strided one costs a copy, of itself alone."""
    if isinstance(tensor, StoredTensor):
        if tensor.loader is None:
            return tensor
        tensor = tensor.loader()
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare as the widest integers that fit: as fast as memory, and right for NaN; -0.0 is looked at later."""
    raw_a, raw_b = a.view(torch.uint8), b.view(torch.uint8)
    if not (raw_a.numel() % 8 or any(raw.data_ptr() % 8 or raw.storage_offset() % 8 for raw in (raw_a, raw_b))):
        raw_a, raw_b = raw_a.view(torch.int64), raw_b.view(torch.int64)
    return torch.equal(raw_a, raw_b)


def _widened(tensor: Tensor) -> Tensor:
    """Return the values as float64 or complex128; exact, but for 64-bit integers beyond 2**53."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_nan(tensor: Tensor) -> Tensor:
    return _widened(tensor).isnan()


def _is_long(tensor: Tensor) -> bool:
    """Say whether float64 does not hold all values of a tensor's type."""
    return tensor.dtype in (torch.int64, torch.uint64)


def _equal_values(a: Tensor, b: Tensor) -> Tensor:
    """Compare values; integers of one type as such, since float64 does not hold all of them."""
    if a.dtype == b.dtype and _is_long(a):
        return a.view(torch.int64) == b.view(torch.int64)
    return _widened(a) == _widened(b)


def _distance(a: Scalar, b: Scalar) -> float:
    """Return the absolute difference of two values; exactly, where both are integers."""
    difference = abs(a - b)
    try:
        return float(difference)
    except OverflowError:
        return math.inf


def _unravelled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        place.append(position)
    return tuple(reversed(place))
