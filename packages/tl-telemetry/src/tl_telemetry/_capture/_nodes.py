"""What a capture is made of: one immutable node for each thing that was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """An immutable value: a number (numpy's too), a string, None, a dtype."""

    value: Any


@dataclass(frozen=True, slots=True)
class Values:
    """A long list, tuple or deque of immutable values, in one piece."""

    kind: str  # "list", "tuple"
    type: type
    values: tuple[Any, ...]
    made_with: Any = None  # as for a Container


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array's content, as a copy that cannot be written to."""

    content: Any


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor's content; ``load()`` gives it back, dense and on the CPU (None: only the digest was kept)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    parameter: bool
    requires_grad: bool
    layout: torch.layout
    sparse_dim: int  # of torch.sparse_coo; else 0
    storage: int  # tensors of one capture with the same number share their memory; 0 where nothing is known
    load: Callable[[], Tensor] | None
    digest: bytes | None

    def content(self) -> Tensor:
        """Return the tensor, dense and on the CPU."""
        if self.load is None:
            raise RuntimeError("only the digest of this tensor was kept")
        return self.load()


@dataclass(frozen=True, slots=True)
class Container:
    """A dict, list, tuple, set or deque (items by key or index), or an object (its attributes by name).

    A key that is an object stands there as an ``Alias``.
    """

    kind: str  # "dict", "list", "tuple", "set", "object", "module"; of a setup's pieces "weights", "gradients", ...
    type: type
    items: Mapping[Any, Node]
    made_with: Any = None  # what an empty one is made with: a deque's length limit, a defaultdict's factory


@dataclass(frozen=True, slots=True)
class Generator:
    """The state of a random number generator: torch's, numpy's or python's."""

    kind: str  # "torch.Generator", "numpy.random.Generator", ...
    state: Any
    device: torch.device | None  # of torch's


@dataclass(frozen=True, slots=True)
class Cursor:
    """An iterator: where it stands, and a copy that goes on from there (None where it cannot be copied)."""

    kind: str
    position: Any  # comparable; None where nothing tells it
    copy: Any


@dataclass(frozen=True, slots=True)
class Stateful:
    """A library's object that says itself what its state is (``state_dict``)."""

    type: type
    state: Node


@dataclass(frozen=True, slots=True)
class Alias:
    """A thing that was met before, at ``path``."""

    path: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A thing that is not looked into (a function, a class, a file, a lock); two of one type count as equal."""

    type_name: str
    value: Any


Node: TypeAlias = Plain | Values | Array | TensorNode | Container | Generator | Cursor | Stateful | Alias | Opaque
