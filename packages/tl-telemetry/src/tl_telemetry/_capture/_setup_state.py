"""Captures what a setup holds at one moment, piece by piece."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_core import TrainingSetup
from tl_telemetry._capture._kinds import generator_state, is_library
from tl_telemetry._capture._nodes import Alias, Container, Cursor, Generator, Node, Opaque, Plain, Stateful, TensorNode
from tl_telemetry._capture._walk import Keep, Walk, keep_in_memory, module_tensors

# What every optimizer of torch has beside its state and groups: arguments and machinery.
_OPTIMIZER_PARTS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "step"}
# What a setup always has; anything else was added by the person.
_SETUP_PARTS = frozenset(vars(TrainingSetup(torch.nn.Module(), {})))


class Piece(NamedTuple):
    """A part of the state that is saved and restored as a whole.

    Attributes:
        kind: ``"weights"``, ``"modes"``, ``"module attributes"``, ``"optimizer state"``, ``"param groups"``,
            ``"optimizer attributes"``, ``"scheduler"``, ``"scaler"``, ``"state"``, ``"attribute"``, ``"gradients"``,
            ``"rng"`` or ``"outside"``.
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

    def shapes(self, piece: Piece) -> set[tuple[int, ...]]:
        """Return the shapes of a piece's tensors."""
        node = self.pieces.get(piece)
        items = node.items.values() if isinstance(node, Container) else ()
        return {item.shape for item in items if isinstance(item, TensorNode)}

    def portable(self) -> StateCapture:
        """Return the same capture without the objects that it refers to, so that it can go to another process.

        It can be compared, and its tensors read; iterators cannot be put back from it.
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
        known = node.type.__module__ in ("builtins", "collections")
        return Container(node.kind, node.type if known else object, items)
    if isinstance(node, Stateful):
        return Stateful(object, _portable(node.state))
    if isinstance(node, Opaque):
        return Opaque(node.type_name, None)
    return Cursor(node.kind, node.position, None) if isinstance(node, Cursor) else node


def _digests_below(node: Node | None) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    if isinstance(node, TensorNode) and node.digest is not None:
        yield (), node.digest
    elif isinstance(node, Stateful):
        yield from _digests_below(node.state)
    elif isinstance(node, Container):
        for key, item in node.items.items():
            for path, digest in _digests_below(item):
                yield (key, *path), digest


def capture_state(
    setup: TrainingSetup, *, outside: Mapping[str, Any] | None = None, keep: Keep = keep_in_memory
) -> StateCapture:
    """Capture the whole state of a setup, and of things outside of it, without changing anything.

    What is captured is what is there, not what a ``state_dict`` tells: plain attributes of the person's objects,
    generators and iterators among them. What is met twice is captured once.

    Args:
        setup: the setup.
        outside: further things by name: globals, closure cells, the object that a step is bound to.
        keep: keeps a tensor's content and returns what gives it back; by default a copy on the CPU.

    Returns:
        The capture.
    """
    walk = Walk(keep)
    pieces: dict[Piece, Node] = {}
    walk.meet(setup, "setup")
    walk.meet(setup.state, "setup.state")
    walk.meet(setup.model, "model")
    for name, optimizer in setup.optimizers.items():
        walk.meet(optimizer, f"setup.optimizers[{name!r}]")
    for name, scheduler in setup.schedulers.items():
        walk.meet(scheduler, f"setup.schedulers[{name!r}]")
    for name, entry in setup.state.items():
        walk.meet(entry, f"setup.state[{name!r}]")
    module = walk.node(setup.model, "model")
    assert isinstance(module, Container)
    pieces[Piece("weights")] = module.items["weights"]
    pieces[Piece("modes")] = module.items["modes"]
    pieces[Piece("module attributes")] = module.items["attributes"]
    for name, optimizer in setup.optimizers.items():
        _capture_optimizer(walk, pieces, name, optimizer)
    for name, scheduler in setup.schedulers.items():
        pieces[Piece("scheduler", name)] = walk.node(scheduler, f"setup.schedulers[{name!r}]")
    if setup.scaler is not None:
        pieces[Piece("scaler")] = walk.node(setup.scaler, "setup.scaler")
    for name, entry in setup.state.items():
        pieces[Piece("state", name)] = walk.node(entry, f"setup.state[{name!r}]")
    for name, value in vars(setup).items():
        if name not in _SETUP_PARTS:
            pieces[Piece("attribute", name)] = walk.node(value, f"setup.{name}")
    for name, value in (outside or {}).items():
        pieces[Piece("outside", name)] = walk.node(value, name)
    pieces[Piece("gradients")] = _gradients(walk, setup)
    pieces.update({Piece("rng", name): node for name, node in _rng().items()})
    order = {name: parameter_order(walk, optimizer) for name, optimizer in setup.optimizers.items()}
    return StateCapture(pieces, order, walk.uncopied, walk.nodes)


def capture_outside(outside: Mapping[str, Any], *, keep: Keep = keep_in_memory) -> StateCapture:
    """Capture things that belong to no setup, by name, as ``capture_state`` does."""
    walk = Walk(keep)
    pieces = {Piece("outside", name): walk.node(value, name) for name, value in outside.items()}
    return StateCapture(pieces, {}, walk.uncopied, walk.nodes)


def _capture_optimizer(walk: Walk, pieces: dict[Piece, Node], name: str, optimizer: Any) -> None:
    path = f"setup.optimizers[{name!r}]"
    walk.meet(optimizer.param_groups, f"{path}.param_groups")
    groups = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        place = f"{path}.param_groups[{index}]"
        held = {key: walk.node(value, f"{place}[{key!r}]") for key, value in options.items()}
        groups[index] = Container("dict", dict, held)
    pieces[Piece("param groups", name)] = Container("groups", list, groups)
    state = getattr(optimizer, "state", None)
    if isinstance(state, dict):
        walk.meet(state, f"{path}.state")
        names = {id(p): n for n, p in named_parameters(optimizer, walk).items()}
        held = {}
        for parameter, values in list(state.items()):
            key = names.get(id(parameter), str(parameter) if isinstance(parameter, str) else "?")
            held[key] = walk.node(values, f"{path}.state[{key}]")
        pieces[Piece("optimizer state", name)] = Container("by parameter", dict, held)
    if not is_library(type(optimizer)):
        own = {key: value for key, value in vars(optimizer).items() if key not in _OPTIMIZER_PARTS}
        held = {key: walk.node(value, f"{path}.{key}") for key, value in own.items()}
        pieces[Piece("optimizer attributes", name)] = Container("object", type(optimizer), held)


def named_parameters(optimizer: Any, walk: Walk | None = None) -> dict[str, Tensor]:
    """Name an optimizer's parameters: as the walk met them, else by their place in its groups."""
    named: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            met = walk.knows(parameter) if walk is not None else None
            named[met.removeprefix("model.") if met else f"param_groups[{index}]['params'][{position}]"] = parameter
    return named


def parameter_order(walk: Walk, optimizer: Any) -> list[list[str]]:
    """List the names of an optimizer's parameters, group by group."""
    names = {id(parameter): name for name, parameter in named_parameters(optimizer, walk).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _gradients(walk: Walk, setup: TrainingSetup) -> Node:
    held: dict[Any, Node] = {}
    for name, tensor in module_tensors(setup.model).items():
        if tensor.grad is not None:
            held[name] = walk.node(tensor.grad, f"model.{name}.grad")
    return Container("gradients", dict, held)


def _rng() -> dict[str, Node]:
    states: dict[str, Node] = {"python": Plain(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = Generator("numpy.random.RandomState", generator_state(numpy.random.mtrand._rand))
    states["torch"] = Plain(bytes(torch.get_rng_state().tolist()))
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            for index, state in enumerate(module.get_rng_state_all()):
                states[f"{kind}:{index}"] = Plain(bytes(state.tolist()))
    return states
