"""What a file says about one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorEntry:
    """Describe a tensor of a file.

    Attributes:
        name: The name under which its bytes are stored.
        dtype: Its dtype; of an array or bytes, the dtype of the stored tensor.
        shape: Its shape.
        strides: Its strides, in elements.
        nbytes: How many bytes are stored under the name.
        digest: The xxh3_128 of the stored bytes, 32 hexadecimal digits.
        offset: Of a view, the byte of the stored tensor at which it begins.
        whole: False for a view, which shares the stored tensor's memory but is another object.
        kind: ``"tensor"``, or ``"array"`` for a numpy array, or ``"bytes"``.
        array: Of an array, numpy's name of its dtype (``"<f8"``).
        array_shape: Of an array, its shape.
        array_order: Of an array, ``"C"`` or ``"F"``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    digest: str
    offset: int = 0
    whole: bool = True
    kind: str = "tensor"
    array: str = ""
    array_shape: tuple[int, ...] = ()
    array_order: str = "C"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the strides of a row-major tensor, as torch counts them."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * max(shape[index + 1], 1)
    return tuple(strides)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether a layout fills its span of memory without gaps and without overlap: a row-major one, permuted."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from the first to the last one of a layout that has any, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
