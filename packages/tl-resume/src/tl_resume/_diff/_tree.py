"""A nested state as leaves by path: tensors, wherever they lie, and plain values."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tl_resume._diff._stored import StoredTensor
from tl_resume._diff._tensors import AnyTensor
from tl_resume._format._sparse import SPARSE, sparse_parts

Path = tuple[Any, ...]
SCALARS = (bool, int, float, complex, str, type(None))
PACKED = getattr(torch, "float4_e2m1fn_x2", None)


@dataclass(frozen=True, eq=False)
class TensorLeaf:
    """A tensor of the tree, with the name of its type as messages call it."""

    data: AnyTensor
    label: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return math.prod(self.data.shape) * self.data.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.label} {list(self.shape)}"


@dataclass
class Flat:
    """Hold a tree's leaves and containers.

    Attributes:
        leaves: ``TensorLeaf`` or plain value by path. A list or tuple of nothing but scalars is one plain value.
        containers: ``"dict"``, ``"list"``, ``"tuple"`` or ``"deque"`` by path; a sparse tensor is a dict of its parts,
            a nested tensor a list.
        empty: The paths of containers that hold nothing.
    """

    leaves: dict[Path, Any] = field(default_factory=dict)
    containers: dict[Path, str] = field(default_factory=dict)
    empty: set[Path] = field(default_factory=set)


def flatten(value: Any) -> Flat:
    """Gather the leaves of a nested state.

    Args:
        value: Mappings, lists and tuples of tensors, arrays and plain values.

    Returns:
        The leaves and containers; nothing is read or copied.

    Raises:
        ValueError: It is nested too deeply, or holds itself.
    """
    flat = Flat()
    try:
        _gather(value, (), flat)
    except RecursionError:
        raise ValueError("the state is nested too deeply, or holds itself") from None
    return flat


def _gather(value: Any, path: Path, flat: Flat) -> None:
    if isinstance(value, Mapping):
        flat.containers[path] = "dict"
        children = list(value.items())
    elif isinstance(value, Tensor) and value.layout in SPARSE:
        flat.containers[path] = "dict"
        children = [*sparse_parts(value).items(), ("size", tuple(value.shape))]
    elif isinstance(value, Tensor) and value.is_nested:
        flat.containers[path] = "list"
        children = list(enumerate(value.detach().unbind()))
    elif isinstance(value, deque):
        flat.containers[path] = "deque"
        children = list(enumerate(value))
    elif isinstance(value, (list, tuple)) and not (value and all(isinstance(item, SCALARS) for item in value)):
        flat.containers[path] = "list" if isinstance(value, list) else "tuple"
        children = list(enumerate(value))
    else:
        flat.leaves[path] = _leaf(value)
        return
    if not children:
        flat.empty.add(path)
    for key, child in children:
        _gather(child, (*path, key), flat)


def _leaf(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return TensorLeaf(value, value.label)
    if isinstance(value, Tensor):
        return _tensor_leaf(value)
    if isinstance(value, (bytes, bytearray)):
        data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return TensorLeaf(data, "bytes")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array_leaf(value, numpy)
    return value


def _tensor_leaf(tensor: Tensor) -> Any:
    if is_lazy(tensor):
        return "<uninitialised tensor of a lazy module>"
    label = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return f"<meta tensor, {label} {list(tensor.shape)}>"
    data = tensor.detach()
    if data.is_quantized:
        return TensorLeaf(data.dequantize(), label)
    if data.layout is not torch.strided:
        return TensorLeaf(data.to_dense(), label)
    if data.dtype == PACKED:
        return TensorLeaf(data.contiguous().view(torch.uint8).reshape(-1), label)
    return TensorLeaf(data, label)


def _array_leaf(array: Any, numpy: Any) -> Any:
    if array.dtype.hasobject:
        return repr(array)
    plain = array.dtype.isnative and array.dtype.kind in "biufc" and hasattr(torch, array.dtype.name)
    if plain:
        regular = array.flags.writeable and array.flags.c_contiguous
        data = torch.from_numpy(array if regular else numpy.array(array, order="C"))
        return TensorLeaf(data, array_label(array.dtype.str, data.dtype))
    raw = bytearray(array.tobytes())
    data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return TensorLeaf(data, array_label(array.dtype.str, None))


def array_label(code: str, dtype: torch.dtype | None) -> str:
    """Name the type of a numpy array: by torch's dtype where there is one, else by numpy's code."""
    return f"numpy {str(dtype).removeprefix('torch.') if dtype else code}"
