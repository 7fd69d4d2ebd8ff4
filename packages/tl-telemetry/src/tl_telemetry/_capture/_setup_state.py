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
from tl_telemetry._capture._generators import capture_generator
from tl_telemetry._capture._kinds import is_library, is_plain
from tl_telemetry._capture._modules import module_tensors
from tl_telemetry._capture._nodes import Alias, Container, Cursor, Node, Opaque, Plain, Stateful, TensorNode, Values
from tl_telemetry._capture._walk import Keep, Walk, keep_in_memory

# What every optimizer of torch has beside its state and groups: arguments and machinery.
_OPTIMIZER_PARTS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "step"}
# What a setup always has; anything else was added by the person.
_SETUP_PARTS = frozenset(vars(TrainingSetup(torch.nn.Module(), {})))


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

    def plain(self, name: str) -> list[Any]:
        """Return the plain values of all attributes of a name, wherever they lie."""
        containers = [node for node in self.nodes.values() if isinstance(node, Container)]
        held = [node.items[name] for node in containers if name in node.items]
        held += [node for piece, node in self.pieces.items() if piece.name == name]
        return [node.value for node in held if isinstance(node, Plain)]

    def types(self) -> set[type]:
        """Return the classes of all objects of the person's that were met."""
        nodes = [*self.pieces.values(), *self.nodes.values()]
        return {node.type for node in nodes if isinstance(node, Container) and node.kind == "object"}

    def shapes(self, piece: Piece) -> set[tuple[int, ...]]:
        """Return the shapes of a piece's tensors."""
        node = self.pieces.get(piece)
        items = node.items.values() if isinstance(node, Container) else ()
        return {item.shape for item in items if isinstance(item, TensorNode)}

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
        The capture. Of the setup it keeps nothing alive but what iterators iterate over.
    """
    walk = Walk(keep)
    pieces = walk_setup(walk, setup, outside or {})
    order = {name: parameter_order(walk, optimizer) for name, optimizer in setup.optimizers.items()}
    return StateCapture(pieces, order, walk.uncopied, walk.nodes)


def walk_setup(walk: Walk, setup: TrainingSetup, outside: Mapping[str, Any]) -> dict[Piece, Node]:
    """Walk through a whole setup, and make a node of each piece."""
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
    pieces[Piece("trainable")] = module.items["trainable"]
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
    for name, value in outside.items():
        pieces[Piece("outside", name)] = walk.node(value, name)
    pieces[Piece("gradients")] = _gradients(walk, setup)
    pieces.update({Piece("rng", name): node for name, node in _rng().items()})
    return pieces


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
        held = {key: walk.node(values, f"{path}.state[{key}]") for key, values in named_state(optimizer, walk).items()}
        pieces[Piece("optimizer state", name)] = Container("by parameter", dict, held)
    if not is_library(type(optimizer)):
        own = optimizer_attributes(optimizer)
        held = {key: walk.node(value, f"{path}.{key}") for key, value in own.items()}
        pieces[Piece("optimizer attributes", name)] = Container("optimizer attributes", type(optimizer), held)


def optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return what the person's own optimizer has beside its state and groups; nothing for a library's."""
    if is_library(type(optimizer)):
        return {}
    return {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_PARTS}


def named_parameters(optimizer: Any, walk: Walk) -> dict[str, Tensor]:
    """Name an optimizer's parameters: as the walk met them, else by their place in its groups."""
    named: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            met = walk.knows(parameter)
            named[met.removeprefix("model.") if met else f"param_groups[{index}]['params'][{position}]"] = parameter
    return named


def named_state(optimizer: Any, walk: Walk) -> dict[Any, Any]:
    """Return an optimizer's state by the names of its parameters; keys that are no parameters stay what they are.

    State of a parameter that has left the groups, and that the walk has not met, is left out: no step reads it.
    """
    names = {id(parameter): name for name, parameter in named_parameters(optimizer, walk).items()}
    state = {}
    for key, values in list(optimizer.state.items()):
        name = key if is_plain(key) else names.get(id(key), (walk.knows(key) or "").removeprefix("model."))
        if name != "":
            state[name] = values
    return state


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


def numpy_generator() -> Any:
    """Return the generator behind numpy's global functions; None where numpy was not imported."""
    numpy = sys.modules.get("numpy")
    return numpy.random.mtrand._rand if numpy is not None and hasattr(numpy, "random") else None


def _rng() -> dict[str, Node]:
    states: dict[str, Node] = {"python": Plain(random.getstate())}
    if (generator := numpy_generator()) is not None:
        states["numpy"] = capture_generator(generator)
    states["torch"] = Plain(bytes(torch.get_rng_state().tolist()))
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            for index, state in enumerate(module.get_rng_state_all()):
                states[f"{kind}:{index}"] = Plain(bytes(state.tolist()))
    return states
