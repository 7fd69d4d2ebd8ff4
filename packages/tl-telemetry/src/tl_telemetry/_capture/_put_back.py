"""Puts pieces of a capture back into a setup, in place wherever it can."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_telemetry._capture._kinds import is_library, set_generator_state
from tl_telemetry._capture._nodes import (
    Alias,
    Container,
    Cursor,
    Generator,
    Node,
    Opaque,
    Plain,
    Stateful,
    TensorNode,
)
from tl_telemetry._capture._setup_state import Piece, StateCapture, named_parameters
from tl_telemetry._capture._walk import Walk, attributes_of, keep_in_memory, module_parts, module_tensors

_MISSING = object()
# A scheduler or scaler restored after its optimizer writes nothing into it, but one built later may: groups come last.
_ORDER = ("weights", "module attributes", "modes", "optimizer state", "optimizer attributes", "scheduler", "scaler")


def put_back(
    capture: StateCapture,
    setup: TrainingSetup | None,
    pieces: Iterable[Piece],
    *,
    outside: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] | None = None,
) -> None:
    """Put pieces of a capture into a setup (the one it was taken of, or another one that is built alike).

    Tensors, dicts, lists and objects that are there are changed in place, so that whoever refers to them sees it.

    Args:
        capture: where the values come from; it can be used again afterwards.
        setup: the setup to change; None where only things outside of one are put back.
        pieces: which pieces.
        outside: how to get and set each thing outside of the setup that was captured.
    """
    nowhere = TrainingSetup(nn.Module(), {})
    _PutBack(capture, nowhere if setup is None else setup, outside or {}).pieces(pieces)


class _PutBack:
    """One act of putting back: what was built for one place is used wherever an alias refers to it."""

    def __init__(
        self,
        capture: StateCapture,
        setup: TrainingSetup,
        outside: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]],
    ) -> None:
        self._capture = capture
        self._setup = setup
        self._outside = outside
        self._known = _known(setup)
        self._made: dict[int, Any] = {}  # by the id of the node

    def pieces(self, pieces: Iterable[Piece]) -> None:
        """Put pieces back, in an order in which no piece overwrites an earlier one."""
        rank = {kind: index for index, kind in enumerate(_ORDER)}
        with torch.no_grad():
            for piece in sorted(pieces, key=lambda p: (rank.get(p.kind, len(rank)), p.kind == "param groups")):
                node = self._capture.pieces.get(piece)
                if node is not None:
                    self._piece(piece, node)

    def _piece(self, piece: Piece, node: Node) -> None:
        setup, kind, name = self._setup, piece.kind, piece.name
        if kind == "weights":
            self._weights(setup.model, node)
        elif kind == "modes":
            _set_modes(setup.model, node)
        elif kind == "module attributes":
            self._module_attributes(setup.model, node)
        elif kind == "optimizer state":
            self._optimizer_state(setup.optimizers[name], node)
        elif kind == "param groups":
            assert isinstance(node, Container)
            for group, held in zip(setup.optimizers[name].param_groups, node.items.values(), strict=False):
                assert isinstance(held, Container)
                for key, value in held.items.items():
                    group[key] = self.value(value, group.get(key, _MISSING))
        elif kind == "optimizer attributes":
            self._attributes(setup.optimizers[name], node)
        elif kind == "scheduler":
            self._store(setup.schedulers, name, node)
        elif kind == "scaler":
            setup.scaler = self.value(node, setup.scaler)
        elif kind == "state":
            self._store(setup.state, name, node)
        elif kind == "attribute":
            setattr(setup, name, self.value(node, getattr(setup, name, _MISSING)))
        elif kind == "gradients":
            self._gradients(setup.model, node)
        elif kind == "rng":
            _set_rng(name, node)
        elif kind == "outside" and name in self._outside:
            get, store = self._outside[name]
            try:
                live = get()
            except LookupError:  # a global that was deleted, an empty cell
                live = _MISSING
            store(self.value(node, live))

    def _store(self, members: dict[str, Any], name: str, node: Node) -> None:
        members[name] = self.value(node, members.get(name, _MISSING))

    def value(self, node: Node, live: Any) -> Any:
        """Return what belongs in a place: the object that is there, changed in place, or a new one."""
        if isinstance(node, Plain):
            return self._array(node.value, live)
        if isinstance(node, Opaque):
            return node.value if live is _MISSING or type(live) is not type(node.value) else live
        if isinstance(node, Alias):
            return self._alias(node, live)
        if isinstance(node, TensorNode):
            made = self._made[id(node)] = _tensor(node, live)
            return made
        if isinstance(node, Generator):
            if live is not _MISSING and live is not None:
                set_generator_state(live, node.state)
            return live
        if isinstance(node, Cursor):
            return live if node.copy is None else copy.deepcopy(node.copy, {id(d): d for d in _data_below(node.copy)})
        if isinstance(node, Stateful):
            if live is _MISSING or not hasattr(live, "load_state_dict"):
                return live
            live.load_state_dict(self.value(node.state, _MISSING))
            return live
        return self._container(node, live)

    def _array(self, value: Any, live: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(live, numpy.ndarray):
            return value
        dtype, shape, content = value
        fresh = numpy.frombuffer(content, dtype=dtype).reshape(shape)
        if live.shape == shape and str(live.dtype) == dtype and live.flags.writeable:
            live[...] = fresh
            return live
        return fresh.copy()

    def _alias(self, node: Alias, live: Any) -> Any:
        if node.path in self._known:
            return self._known[node.path]
        target = self._capture.nodes.get(node.path)
        if target is None:
            return live
        return self._made[id(target)] if id(target) in self._made else self.value(target, live)

    def _container(self, node: Container, live: Any) -> Any:
        if node.kind == "dict":
            return self._dict(node, live)
        if node.kind in ("list", "tuple", "set"):
            return self._sequence(node, live)
        if node.kind == "module":
            self._weights(live, node.items["weights"])
            _set_modes(live, node.items["modes"])
            self._module_attributes(live, node.items["attributes"])
            return live
        if live is _MISSING or type(live) is not node.type:
            live = object.__new__(node.type)
        self._made[id(node)] = live  # before what is below it, which may refer back
        self._attributes(live, node)
        return live

    def _dict(self, node: Container, live: Any) -> Any:
        if type(live) is not node.type:
            live = _empty(node.type)
        self._made[id(node)] = live
        held = {self._key(key): (value, live.get(self._key(key), _MISSING)) for key, value in node.items.items()}
        made = {key: self.value(value, old) for key, (value, old) in held.items()}
        if list(live) != list(made):
            live.clear()
        for key, value in made.items():
            live[key] = value
        return live

    def _key(self, key: Any) -> Any:
        return self._known.get(key.path, key) if isinstance(key, Alias) else key

    def _sequence(self, node: Container, live: Any) -> Any:
        make: Any = node.type
        old = list(live) if isinstance(live, (list, tuple)) or hasattr(live, "maxlen") else []
        if None in node.items:
            whole = node.items[None]
            made = list(whole.value) if isinstance(whole, Plain) else []
        else:
            padded = old + [_MISSING] * (len(node.items) - len(old))
            made = [self.value(v, o) for v, o in zip(node.items.values(), padded, strict=False)]
        if node.kind == "tuple":
            return make(*made) if hasattr(make, "_fields") else tuple(made)
        if type(live) is make and node.kind == "list":
            live.clear()
            live.extend(made)
            return live
        if type(live) is make and hasattr(live, "clear"):
            live.clear()
            live.update(made)
            return live
        return make(made)

    def _attributes(self, live: Any, node: Node) -> None:
        if not isinstance(node, Container):
            return
        held = attributes_of(live)
        for name in [name for name in held if name not in node.items]:
            if node.kind == "object" and not is_library(type(live)):
                object.__delattr__(live, name)
        for name, value in node.items.items():
            made = self.value(value, held.get(name, _MISSING))
            if made is not _MISSING and made is not held.get(name, _MISSING):
                object.__setattr__(live, name, made)

    def _weights(self, module: nn.Module, node: Node) -> None:
        assert isinstance(node, Container)
        for name, tensor in module_tensors(module).items():
            value = node.items.get(name)
            if isinstance(value, TensorNode):
                _tensor(value, tensor)

    def _module_attributes(self, module: nn.Module, node: Node) -> None:
        assert isinstance(node, Container)
        parts = dict(module_parts(module))
        for name, held in node.items.items():
            if name in parts and isinstance(held, Container):
                for attribute, value in held.items.items():
                    old = vars(parts[name]).get(attribute, _MISSING)
                    made = self.value(value, old)
                    if made is not _MISSING and made is not old:
                        setattr(parts[name], attribute, made)

    def _optimizer_state(self, optimizer: Any, node: Node) -> None:
        assert isinstance(node, Container)
        parameters = named_parameters(optimizer, _met(self._setup))
        for name in [name for name, parameter in parameters.items() if name not in node.items]:
            optimizer.state.pop(parameters[name], None)
        for name, value in node.items.items():
            key = parameters.get(name, name)
            optimizer.state[key] = self.value(value, optimizer.state.get(key, _MISSING))

    def _gradients(self, module: nn.Module, node: Node) -> None:
        assert isinstance(node, Container)
        for name, tensor in module_tensors(module).items():
            held = node.items.get(name)
            held = None if held is None else self._capture.resolve(held)
            tensor.grad = held.content().to(tensor.device) if isinstance(held, TensorNode) else None


def _tensor(node: TensorNode, live: Any) -> Any:
    if isinstance(live, Tensor) and live.shape == node.shape and live.dtype == node.dtype:
        live.detach().copy_(node.content())
        return live
    made = node.content().to(node.device, copy=True)
    return nn.Parameter(made, node.requires_grad) if node.parameter else made.requires_grad_(node.requires_grad)


def _empty(cls: type) -> Any:
    try:
        return cls()
    except TypeError:  # a defaultdict of another kind, a mapping that needs arguments
        return {}


def _data_below(iterator: Any) -> list[Any]:
    """Return what a copied iterator iterates over, which copies share."""
    found: list[Any] = []
    for part in iterator.__reduce__()[1]:
        found += _data_below(part) if hasattr(part, "__next__") else [part]
    return found


def _set_modes(module: nn.Module, node: Node) -> None:
    assert isinstance(node, Container)
    for name, part in module_parts(module):
        mode = node.items.get(name)
        if isinstance(mode, Plain):
            part.training = mode.value


def _set_rng(name: str, node: Node) -> None:
    if isinstance(node, Generator):
        set_generator_state(sys.modules["numpy"].random.mtrand._rand, node.state)
        return
    assert isinstance(node, Plain)
    if name == "python":
        random.setstate(node.value)
    elif name == "torch":
        torch.set_rng_state(torch.tensor(list(node.value), dtype=torch.uint8))
    else:
        kind, _, index = name.partition(":")
        getattr(torch, kind).set_rng_state(torch.tensor(list(node.value), dtype=torch.uint8), int(index))


def _met(setup: TrainingSetup) -> Walk:
    walk = Walk(keep_in_memory)
    for name, tensor in module_tensors(setup.model).items():
        walk.meet(tensor, f"model.{name}")
    return walk


def _known(setup: TrainingSetup) -> dict[str, Any]:
    """Return the objects that aliases most often refer to, by the paths under which a capture meets them."""
    known: dict[str, Any] = {"setup": setup, "setup.state": setup.state, "model": setup.model}
    known |= {f"model.{name}" if name else "model": part for name, part in module_parts(setup.model)}
    known |= {f"model.{name}": tensor for name, tensor in module_tensors(setup.model).items()}
    known |= {f"setup.optimizers[{name!r}]": optimizer for name, optimizer in setup.optimizers.items()}
    known |= {f"setup.schedulers[{name!r}]": scheduler for name, scheduler in setup.schedulers.items()}
    return known | {f"setup.state[{name!r}]": entry for name, entry in setup.state.items()}
