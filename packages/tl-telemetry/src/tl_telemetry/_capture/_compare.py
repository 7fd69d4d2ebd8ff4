"""The comparison of two captures: what differs, where, by how much."""

from __future__ import annotations

import cmath
import math
import numbers
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_telemetry._capture._iterators import described_position, same_position
from tl_telemetry._capture._nodes import (
    Alias,
    Array,
    Container,
    Cursor,
    Generator,
    Node,
    Opaque,
    Plain,
    Stateful,
    TensorNode,
    Values,
)
from tl_telemetry._capture._pieces import Piece, StateCapture


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors, or numpy arrays, of one shape differ.

    Attributes:
        num_different: how many elements lie apart by more than the tolerance.
        num_elements: of how many.
        largest: the largest absolute difference; NaN where one side is NaN, which counts as the largest.
        index: where that is.
        values: the two values there.
    """

    num_different: int
    num_elements: int
    largest: float
    index: tuple[int, ...]
    values: tuple[Any, Any]


@dataclass(frozen=True)
class StateDifference:
    """One place at which two captures differ.

    Attributes:
        piece: the piece that the place belongs to.
        path: the place below the piece: ``("enc.weight",)``, ``("head.bias", "exp_avg")``, ``(0, "lr")``.
        a: what the first capture has there; None for nothing.
        b: what the second has there; None for nothing.
        tensor: how two tensors or arrays of one shape differ; None for anything else.
    """

    piece: Piece
    path: tuple[Any, ...]
    a: Node | None
    b: Node | None
    tensor: TensorDifference | None = None

    def __str__(self) -> str:
        place = ".".join(map(str, (self.piece.kind, self.piece.name, *self.path))).replace("..", ".")
        if self.tensor is None:
            return f"{place}: {self.shown_a} against {self.shown_b}"
        return f"{place}: {self.tensor.num_different} of {self.tensor.num_elements} elements"

    def __repr__(self) -> str:
        return f"<StateDifference {self}>"

    @property
    def kind(self) -> str:
        """What lies there: ``"tensor"``, ``"generator"``, ``"iterator"``, ``"number"``, ``"value"`` or ``"other"``."""
        node = self.a if self.a is not None else self.b
        if isinstance(node, TensorNode):
            return "tensor"
        if isinstance(node, Generator):
            return "generator"
        if isinstance(node, Cursor):
            return "iterator"
        if isinstance(node, Plain) and isinstance(node.value, numbers.Real):
            return "number"
        return "value" if isinstance(node, (Plain, Array)) else "other"

    @property
    def type_name(self) -> str:
        """The name of the type of what lies there; empty for plain values."""
        node = self.a if self.a is not None else self.b
        if isinstance(node, (Container, Values, Stateful)):
            return node.type.__name__
        return node.kind if isinstance(node, (Generator, Cursor)) else ""

    @property
    def shown_a(self) -> str:
        """The first capture's value, in a few words."""
        return shown(self.a)

    @property
    def shown_b(self) -> str:
        """The second capture's value, in a few words."""
        return shown(self.b)

    @property
    def plain_a(self) -> Any:
        """The first capture's value, where it is a plain one; else None."""
        return self.a.value if isinstance(self.a, Plain) else None

    @property
    def plain_b(self) -> Any:
        """The second capture's value, where it is a plain one; else None."""
        return self.b.value if isinstance(self.b, Plain) else None

    def tensor_a(self) -> Tensor | None:
        """Return the first capture's tensor, where it was kept; else None."""
        return self.a.content() if isinstance(self.a, TensorNode) and self.a.load is not None else None

    def tensor_b(self) -> Tensor | None:
        """Return the second capture's tensor, where it was kept; else None."""
        return self.b.content() if isinstance(self.b, TensorNode) and self.b.load is not None else None


def shown(node: Node | None) -> str:
    """Say in a few words what lies at a place."""
    if node is None:
        return "nothing"
    if isinstance(node, Plain):
        text = f"{node.value:.6g}" if isinstance(node.value, float) else repr(node.value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(node, TensorNode):
        if node.shape == () and node.load is not None:
            value = node.content().item()
            return f"{value:.6g}" if isinstance(value, float) else repr(value)
        return f"a {str(node.dtype).removeprefix('torch.')} tensor of shape {node.shape}"
    if isinstance(node, Array):
        return f"a {node.content.dtype} array of shape {node.content.shape}"
    if isinstance(node, (Container, Values)):
        count = len(node.items if isinstance(node, Container) else node.values)
        noun = node.type.__name__
        return noun if node.kind in ("object", "module") else f"a {noun} of {count} item{'' if count == 1 else 's'}"
    if isinstance(node, Generator):
        return f"a {node.kind} in another state"
    if isinstance(node, Cursor):
        return f"a {node.kind} at {described_position(node.position)}"
    if isinstance(node, Alias):
        return node.path
    return node.type_name if isinstance(node, Opaque) else type(node).__name__


def compare_captures(
    a: StateCapture, b: StateCapture, *, rtol: float = 0.0, atol: float = 0.0
) -> list[StateDifference]:
    """Compare two captures, piece by piece. NaN equals NaN at the same place.

    Args:
        a: the first capture.
        b: the second capture.
        rtol: how far floating-point values may lie apart, relative to the largest magnitude of the tensor (or to the
            number itself); integers and everything else must be equal.
        atol: how far they may lie apart in absolute terms.

    Returns:
        The differences, in the order of ``a``'s pieces.
    """
    found = []
    comparison = _Comparison(a, b, rtol, atol)
    for piece in dict.fromkeys([*a.pieces, *b.pieces]):
        for path, left, right, tensor in comparison.differences(a.pieces.get(piece), b.pieces.get(piece)):
            found.append(StateDifference(piece, path, left, right, tensor))
    return found


_Found = tuple[tuple[Any, ...], "Node | None", "Node | None", "TensorDifference | None"]


class _Comparison:
    def __init__(self, a: StateCapture, b: StateCapture, rtol: float, atol: float) -> None:
        self._a, self._b = a, b
        self._rtol, self._atol = rtol, atol
        self._open: set[tuple[int, int]] = set()

    def differences(self, a: Node | None, b: Node | None) -> Iterator[_Found]:
        if isinstance(a, Alias) and isinstance(b, Alias) and a.path == b.path:
            return
        a = None if a is None else self._a.resolve(a)
        b = None if b is None else self._b.resolve(b)
        pair = id(a), id(b)
        if pair in self._open:  # two structures that contain themselves
            return
        self._open.add(pair)
        yield from self._differences(a, b)
        self._open.discard(pair)

    def _differences(self, a: Node | None, b: Node | None) -> Iterator[_Found]:
        if isinstance(a, Container) and isinstance(b, Container) and a.kind == b.kind:
            lengths = len(a.items), len(b.items)
            if (
                not _same_type(a, b)
                or not _made_alike(a, b)
                or (a.kind in ("list", "tuple") and lengths[0] != lengths[1])
            ):
                yield (), a, b, None
                return
            for key in dict.fromkeys([*a.items, *b.items]):
                for path, left, right, tensor in self.differences(a.items.get(key), b.items.get(key)):
                    yield (key, *path), left, right, tensor
        elif isinstance(a, Stateful) and isinstance(b, Stateful):
            yield from self.differences(a.state, b.state)
        elif isinstance(a, TensorNode) and isinstance(b, TensorNode):
            yield from self._tensors(a, b)
        elif isinstance(a, Array) and isinstance(b, Array):
            yield from self._arrays(a, b)
        elif not self._same(a, b):
            yield (), a, b, None

    def _tensors(self, a: TensorNode, b: TensorNode) -> Iterator[_Found]:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield (), a, b, None
        elif a.digest is not None and a.digest == b.digest:
            return
        elif a.load is None or b.load is None:  # a digest tells that they differ, not how
            yield (), a, b, None
        elif (tensor := compare_tensors(a.content(), b.content(), self._rtol, self._atol)) is not None:
            yield (), a, b, tensor

    def _arrays(self, a: Array, b: Array) -> Iterator[_Found]:
        left, right = a.content, b.content
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            yield (), a, b, None
        elif left.tobytes() != right.tobytes():
            if left.dtype.kind not in "biufc" or left.dtype.itemsize > 16 or not left.dtype.isnative:
                yield (), a, b, None
                return
            found = compare_tensors(torch.tensor(left), torch.tensor(right), self._rtol, self._atol)
            if found is not None:
                yield (), a, b, found

    def _same(self, a: Node | None, b: Node | None) -> bool:
        if isinstance(a, Plain) and isinstance(b, Plain):
            return same_plain(a.value, b.value, self._rtol, self._atol)
        if isinstance(a, Values) and isinstance(b, Values):
            pairs = zip(a.values, b.values, strict=False)
            alike = (x is y or same_plain(x, y, self._rtol, self._atol) for x, y in pairs)
            return a.kind == b.kind and len(a.values) == len(b.values) and all(alike)
        if isinstance(a, Generator) and isinstance(b, Generator):
            if isinstance(a.state, Tensor) and isinstance(b.state, Tensor):
                return bool(torch.equal(a.state, b.state))
            return a.kind == b.kind and bool(a.state == b.state)
        if isinstance(a, Cursor) and isinstance(b, Cursor):
            return same_position(a.position, b.position)
        if isinstance(a, Opaque) and isinstance(b, Opaque):
            return a.type_name == b.type_name
        return a is None and b is None


def _same_type(a: Container, b: Container) -> bool:
    """Tell whether two objects are of one class; a portable capture has forgotten of which."""
    types = a.type, b.type
    return a.kind != "object" or object in types or types[0].__qualname__ == types[1].__qualname__


def _made_alike(a: Container, b: Container) -> bool:
    """Tell whether two containers have one length limit (deque) and one factory (defaultdict), functions left out."""
    given = [made for made in (a.made_with, b.made_with) if isinstance(made, (int, type, type(None)))]
    return len(given) < 2 or given[0] == given[1]


def same_plain(a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Tell whether two immutable values are equal; floats within a tolerance, NaN equal to NaN."""
    a, b = _python_number(a), _python_number(b)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if not (isinstance(a, (int, float, complex)) and isinstance(b, (int, float, complex))):
        return type(a) is type(b) and bool(a == b)
    if a == b or (a != a and b != b):
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    return cmath.isfinite(a) and cmath.isfinite(b) and abs(a - b) <= atol + rtol * max(abs(a), abs(b))


def _python_number(value: Any) -> Any:
    """Return a number of numpy's as python's; anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


_UNKNOWN = TensorDifference(-1, -1, math.nan, (), (None, None))


def _finite_difference(a: Tensor, b: Tensor, rtol: float, atol: float) -> TensorDifference | None:
    """Compare finite tensors in their own precision, in few passes; ``_UNKNOWN`` where they hold NaN or infinities."""
    left, right = a.flatten(), b.flatten()
    distance = (left - right).abs_()
    at = int(distance.argmax())
    largest = float(distance[at])
    if not math.isfinite(largest):
        return _UNKNOWN
    scale = max(abs(float(end)) for ends in (left.aminmax(), right.aminmax()) for end in ends)
    if not math.isfinite(scale):
        return _UNKNOWN
    bound = atol + rtol * scale
    count = int((distance > bound).sum())
    if not count:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
    return TensorDifference(count, a.numel(), largest, index, (left[at].item(), right[at].item()))


def compare_tensors(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> TensorDifference | None:
    """Compare two CPU tensors of one shape and dtype; None when they are equal within the tolerance."""
    if a.dtype is torch.complex32:  # too half-baked to be compared
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if torch.equal(a, b):
        return None
    if a.dtype in (torch.float32, torch.float64) and (found := _finite_difference(a, b, rtol, atol)) is not _UNKNOWN:
        return found
    rounded = a.is_floating_point() or a.is_complex()
    wide = (torch.complex128 if a.is_complex() else torch.float64) if rounded else a.dtype
    left, right = a.to(wide).flatten(), b.to(wide).flatten()
    if rounded:
        same = (left == right) | (left.isnan() & right.isnan())
        distance = (left - right).abs().masked_fill(same, 0.0)
        finite = torch.cat([left[left.isfinite()].abs(), right[right.isfinite()].abs()])
        bound = atol + rtol * (float(finite.max()) if finite.numel() else 0.0)
        apart = ~same & ~(distance <= bound)
    else:
        apart = left != right
        distance = (left.to(torch.float64) - right.to(torch.float64)).abs()
    count = int(apart.sum())
    if not count:
        return None
    at = int(distance.nan_to_num(nan=math.inf).masked_fill(~apart, -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
    return TensorDifference(count, a.numel(), float(distance[at]), index, (left[at].item(), right[at].item()))
