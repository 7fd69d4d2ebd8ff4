"""The memory that tensors lie in, compared by addresses, sizes and strides; no value is ever read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_coverage._inventory import shape_of

MAX_MARKED = 2**28  # bytes of marks for the exact comparison of interleaved views


@dataclass(frozen=True, eq=False)
class Span:
    """The range of addresses, in bytes, that a tensor lies in."""

    name: str
    tensor: torch.Tensor
    first: int
    end: int

    @property
    def device(self) -> torch.device:
        """The device that the addresses belong to."""
        return self.tensor.device


def span_of(name: str, tensor: torch.Tensor) -> Span | None:
    """Return where a tensor lies; None if it has no memory of its own."""
    if shape_of(tensor) is None or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    # Fake and wrapper subclasses have no memory of their own; torch 2.13 warns when a fake tensor is asked for it.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    try:
        first: int = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # inside of torch.func transforms tensors have none either
        return None
    if first == 0:  # the meta device
        return None
    return Span(name, tensor, first, first + (_last(tensor) + 1) * tensor.element_size())


def overlap(first: Span, second: Span) -> bool:
    """Tell whether two tensors on one device have a byte in common (False for views too large to compare exactly)."""
    if first.end <= second.first or second.end <= first.first:
        return False
    if _is_dense(first.tensor) and _is_dense(second.tensor):
        return True
    # Views can lie between each other without sharing an element (the columns of one matrix): mark the bytes of one
    # and look at those of the other.
    marks = _marked([first], second)
    return marks is not None and bool(marks.any())


def inside(inner: Span, outer: list[Span]) -> bool:
    """Tell whether every byte of a tensor lies in others, taken together, on its device."""
    outer = [span for span in outer if span.first < inner.end and inner.first < span.end]
    reached = inner.first
    for span in sorted(outer, key=lambda span: span.first):
        if span.first <= reached and _is_dense(span.tensor):
            reached = max(reached, span.end)
    if reached >= inner.end:
        return True
    marks = _marked(outer, inner) if outer else None
    return marks is not None and bool(marks.all())


def same_memory(first: Span, second: Span) -> bool:
    """Tell whether two tensors on one device have the same shape, and each element in the same place."""
    if (first.first, first.end) != (second.first, second.end):
        return False
    return first.tensor.shape == second.tensor.shape and first.tensor.stride() == second.tensor.stride()


def _last(tensor: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor fills its address range (in whatever order of its dimensions)."""
    return _last(tensor) + 1 == tensor.numel()


def _marked(spans: list[Span], looked_at: Span) -> torch.Tensor | None:
    """Mark the bytes of some tensors and return the marks of another's; None if that takes too much memory."""
    start = min(span.first for span in [*spans, looked_at])
    size = max(span.end for span in [*spans, looked_at]) - start
    if size > MAX_MARKED:
        return None
    marks = torch.zeros(size, dtype=torch.bool)
    for span in spans:
        _bytes(marks, span, start).fill_(True)
    return _bytes(marks, looked_at, start)


def _bytes(marks: torch.Tensor, span: Span, start: int) -> torch.Tensor:
    width = span.tensor.element_size()
    strides = [stride * width for stride in span.tensor.stride()]
    return marks.as_strided([*span.tensor.shape, width], [*strides, 1], span.first - start)
