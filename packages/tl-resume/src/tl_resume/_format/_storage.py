"""Which stretches of memory are stored, so that shared memory is stored once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tl_resume._format._entry import contiguous_strides, is_dense, span


@dataclass
class Leaf:
    """A tensor of the state, and the place of the tree that is to name it."""

    tensor: Tensor
    name: str
    ref: dict[str, Any]


@dataclass
class Stored:
    """A tensor of the file: what its bytes are, in row-major order, and the strides to restore it with."""

    tensor: Any  # a Tensor, or the bytes of an array
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Plan:
    """What a file stores: tensors, and views of them."""

    stored: list[Stored] = field(default_factory=list)
    views: list[dict[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"__metadata__"})

    def unique_name(self, wanted: str) -> str:
        """Make a name that no other stored tensor has, and that may stand in a header."""
        clean = wanted.encode("utf-8", "replace").decode() or "state"
        name, count = clean, 1
        while name in self.names:
            count += 1
            name = f"{clean}#{count}"
        self.names.add(name)
        return name

    def add(self, tensor: Any, wanted: str, dtype: torch.dtype, shape: Any, strides: Any) -> Stored:
        """Store a tensor under a name as near to the wanted one as can be."""
        stored = Stored(tensor, self.unique_name(wanted), dtype, tuple(shape), tuple(strides))
        self.stored.append(stored)
        return stored

    def add_view(self, leaf: Leaf, of: Stored, strides: Any, offset: int) -> None:
        """Restore a leaf as a view of a stored tensor, from byte ``offset`` on."""
        leaf.ref["$view"] = len(self.views)
        tensor = leaf.tensor
        self.views.append(
            {
                "tensor": of.name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "strides": list(strides),
                "offset": offset,
            }
        )


_Geometry = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]


def plan_storage(plan: Plan, leaves: list[Leaf]) -> None:
    """Decide for every leaf whether it is stored or restored as a view, and say so in its place of the tree."""
    placed: list[tuple[str, int, int, int]] = []
    for index, leaf in enumerate(leaves):
        tensor = leaf.tensor
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            stored = plan.add(tensor, leaf.name, tensor.dtype, tensor.shape, contiguous_strides(tuple(tensor.shape)))
            leaf.ref["$tensor"] = stored.name
            continue
        begin = tensor.data_ptr()
        length = span(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        placed.append((str(tensor.device), begin, begin + length, index))
    for cluster in _clusters(placed):
        # in the order of the state, so that a tied tensor gets the name that it has first
        _plan_cluster(plan, [leaves[index] for index in sorted(cluster)])


def _clusters(placed: list[tuple[str, int, int, int]]) -> list[list[int]]:
    """Group the tensors whose stretches of memory overlap; in the order of the state."""
    clusters: list[list[int]] = []
    device, reach = "", -1
    for where, begin, end, index in sorted(placed):
        if where != device or begin >= reach:
            clusters.append([])
            device, reach = where, end
        clusters[-1].append(index)
        reach = max(reach, end)
    return sorted(clusters, key=min)


def _geometry(tensor: Tensor) -> _Geometry:
    return tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _plan_cluster(plan: Plan, leaves: list[Leaf]) -> None:
    if len({_geometry(leaf.tensor) for leaf in leaves}) == 1:
        _plan_alike(plan, leaves)
        return
    begin = min(leaf.tensor.data_ptr() for leaf in leaves)
    end = max(
        leaf.tensor.data_ptr() + span(tuple(leaf.tensor.shape), leaf.tensor.stride()) * leaf.tensor.element_size()
        for leaf in leaves
    )
    whole = [leaf for leaf in leaves if _covers(leaf.tensor, begin, end) and _fits(leaves, leaf.tensor.data_ptr())]
    if whole:
        first = next((leaf for leaf in whole if leaf.tensor.is_contiguous()), whole[0])
        tensor = first.tensor
        stored = plan.add(tensor, first.name, tensor.dtype, tensor.shape, tensor.stride())
        first.ref["$tensor"] = stored.name
    else:
        first = None
        memory = _stretch([leaf.tensor for leaf in leaves], begin, end)
        begin = memory.data_ptr()
        stored = plan.add(memory, f"{leaves[0].name}.storage", memory.dtype, memory.shape, memory.stride())
    for leaf in leaves:
        if leaf is not first:
            plan.add_view(leaf, stored, leaf.tensor.stride(), leaf.tensor.data_ptr() - begin)


def _plan_alike(plan: Plan, leaves: list[Leaf]) -> None:
    """Store one tensor for objects that are the same elements in the same layout."""
    tensor = leaves[0].tensor
    expanded = [size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    memory = tensor
    for dim, again in enumerate(expanded):
        if again:
            memory = memory.narrow(dim, 0, 1)
    strides = memory.stride()
    if not is_dense(tuple(memory.shape), strides):
        # gaps are not stored, nor restored: the strides are those that a clone would have
        strides = torch.empty_like(memory, device="meta").stride()
    stored = plan.add(memory, leaves[0].name, tensor.dtype, memory.shape, strides)
    shown = [0 if again else stride for again, stride in zip(expanded, strides, strict=True)]
    rest = leaves
    if not any(expanded):
        leaves[0].ref["$tensor"] = stored.name
        rest = leaves[1:]
    for leaf in rest:
        plan.add_view(leaf, stored, shown, 0)


def _covers(tensor: Tensor, begin: int, end: int) -> bool:
    dense = is_dense(tuple(tensor.shape), tensor.stride())
    return dense and tensor.data_ptr() == begin and tensor.numel() * tensor.element_size() == end - begin


def _fits(leaves: list[Leaf], begin: int) -> bool:
    """Tell whether every leaf begins at a whole number of its elements."""
    return all((leaf.tensor.data_ptr() - begin) % leaf.tensor.element_size() == 0 for leaf in leaves)


def _stretch(tensors: list[Tensor], begin: int, end: int) -> Tensor:
    """Make a one-dimensional tensor of the memory that the tensors lie in."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    storage = tensors[0].untyped_storage()
    if any((tensor.data_ptr() - begin) % tensor.element_size() for tensor in tensors):
        begin = storage.data_ptr()  # the elements of any dtype are counted from there
    size = torch.empty(0, dtype=dtype).element_size()
    memory = torch.empty(0, dtype=dtype, device=tensors[0].device)
    return memory.set_(storage, (begin - storage.data_ptr()) // size, ((end - begin) // size,), (1,))
