"""A capture: the state at one moment, piece by piece, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_telemetry._capture._nodes import Alias, Container, Cursor, Node, Opaque, Plain, Stateful, TensorNode, Values


class Piece(NamedTuple):
    """A part of the state that is saved and restored as a whole.

    Attributes:
        kind: ``"weights"``, ``"trainable"`` (which parameters require a gradient), ``"modes"``,
            ``"module attributes"``, ``"optimizer state"``, ``"param groups"``, ``"optimizer attributes"``,
            ``"scheduler"``, ``"scaler"``, ``"state"``, ``"attribute"``, ``"gradients"``, ``"rng"`` or ``"outside"``.
        name: the optimizer's, scheduler's, entry's or attribute's name; empty where there is only one.
    """

    kind: str
    name: str = ""


@dataclass
class StateCapture:
    """What a setup held at one moment.

    Attributes:
        pieces: the state, piece by piece.
        order: of each optimizer, the names of its parameters, group by group.
        uncopied: what could not be copied, by path, with its type.
        nodes: the node of each thing that was met, by path.
    """

    pieces: dict[Piece, Node]
    order: dict[str, list[list[str]]]
    uncopied: dict[str, str]
    nodes: dict[str, Node] = field(repr=False)

    def digests(self) -> Iterator[tuple[Piece, tuple[Any, ...], bytes]]:
        """Yield the digest of every tensor that has one, with its piece and its place below it."""
        for piece, node in self.pieces.items():
            for path, digest in _digests_below(node):
                yield piece, path, digest

    def digest_at(self, piece: Piece, path: tuple[Any, ...]) -> bytes | None:
        """Return the digest of the tensor at a place; None where there is none."""
        return next((digest for p, digest in _digests_below(self.pieces.get(piece)) if p == path), None)

    def tensors(self, piece: Piece) -> Iterator[tuple[tuple[Any, ...], torch.dtype, tuple[int, ...]]]:
        """Yield the place, the dtype and the shape of each tensor of a piece."""
        for path, node in _tensors_below(self.pieces.get(piece)):
            yield path, node.dtype, node.shape

    def contents(self, piece: Piece) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """Yield the place and the content (dense, on the CPU) of each tensor of a piece that was kept."""
        for path, node in _tensors_below(self.pieces.get(piece)):
            if node.load is not None:
                yield path, node.content()

    def trainable(self) -> set[str]:
        """Return the names of the parameters that require a gradient."""
        node = self.pieces[Piece("trainable")]
        assert isinstance(node, Container)
        return {name for name, held in node.items.items() if isinstance(held, Plain) and held.value}

    def portable(self) -> StateCapture:
        """Return the same capture without the objects that it refers to, so that it can go to another process.

        It can be compared, and its tensors read; objects and iterators cannot be put back from it.
        """
        nodes = {path: _portable(node) for path, node in self.nodes.items()}
        pieces = {piece: _portable(node) for piece, node in self.pieces.items()}
        return StateCapture(pieces, self.order, self.uncopied, nodes)

    def resolve(self, node: Node) -> Node:
        """Return what an alias stands for."""
        while isinstance(node, Alias) and node.path in self.nodes:
            node = self.nodes[node.path]
        return node


def _portable(node: Node) -> Node:
    if isinstance(node, Container):
        items = {key: _portable(item) for key, item in node.items.items()}
        return Container(node.kind, _portable_type(node.type), items)
    if isinstance(node, Values):
        return Values(node.kind, _portable_type(node.type), node.values)
    if isinstance(node, Stateful):
        return Stateful(object, _portable(node.state))
    if isinstance(node, Opaque):
        return Opaque(node.type_name, None)
    return Cursor(node.kind, node.position, None) if isinstance(node, Cursor) else node


def _portable_type(cls: type) -> type:
    return cls if cls.__module__ in ("builtins", "collections") else object


def _digests_below(node: Node | None) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    for path, tensor in _tensors_below(node):
        if tensor.digest is not None:
            yield path, tensor.digest


def _tensors_below(node: Node | None) -> Iterator[tuple[tuple[Any, ...], TensorNode]]:
    if isinstance(node, TensorNode):
        yield (), node
    elif isinstance(node, Stateful):
        yield from _tensors_below(node.state)
    elif isinstance(node, Container):
        for key, item in node.items.items():
            for path, tensor in _tensors_below(item):
                yield (key, *path), tensor
