"""Walks from a root through the objects below it, and makes a node of each."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tl_core import module_names
from tl_telemetry._capture._generators import capture_generator, generator_kind
from tl_telemetry._capture._iterators import capture_iterator, is_iterator
from tl_telemetry._capture._kinds import is_array, is_looked_into, is_opaque, is_plain, is_stateful, names_itself
from tl_telemetry._capture._modules import module_attributes, module_tensors
from tl_telemetry._capture._nodes import Alias, Array, Container, Node, Opaque, Plain, Stateful, TensorNode, Values
from tl_telemetry._capture._objects import attributes_of
from tl_telemetry._tensors import is_lazy

# Takes a tensor (dense, detached) and returns what gives its content back on the CPU (None: nothing does), and a digest
# of its bytes (None: there is none). Equal digests stand for equal contents.
Keep = Callable[[Tensor], tuple[Callable[[], Tensor] | None, bytes | None]]

_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_MAX_DEPTH = 60  # of some six calls each, where Python allows a thousand
_LONG = 8  # more immutable values than that are one node
_LIBRARY_LEVEL = 10  # levels that one of a library's object counts for: what moves lies near its surface


def keep_in_memory(tensor: Tensor) -> tuple[Callable[[], Tensor] | None, bytes | None]:
    """Keep a tensor's content as a copy on the CPU."""
    copied = tensor.detach().to("cpu", copy=True)
    return lambda: copied, None


class Walk:
    """One capture's walk; what was met before becomes an ``Alias``, over all roots.

    Attributes:
        uncopied: paths of what could not be copied (generators, iterators of a DataLoader), with its type.
        nodes: the node made of what was met at each path, for the aliases.
        objects: what was met, by path.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # an id is good only as long as its object lives
        self.uncopied: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}
        self.objects: dict[str, Any] = {}

    def knows(self, value: Any) -> str | None:
        """Return the path under which an object was met; None if it was not."""
        return self._seen.get(id(value))

    def meet(self, value: Any, path: str) -> None:
        """Remember an object, so that it is an alias wherever it is met again."""
        self._seen.setdefault(id(value), path)
        self._alive.append(value)
        self.objects.setdefault(path, value)

    def node(self, value: Any, path: str, depth: int = 0) -> Node:
        """Make a node of a value and of what is below it."""
        if is_plain(value):
            return Plain(value)
        if (met := self._seen.get(id(value))) is not None and met != path:  # a root is met before it is walked
            return Alias(met)
        if is_opaque(value) or depth > _MAX_DEPTH:
            return _opaque(value)
        self.meet(value, path)
        made = self.nodes[path] = self._made(value, path, depth)
        return made

    def _made(self, value: Any, path: str, depth: int) -> Node:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, nn.Module):
            return self.module(value, path, depth)
        if isinstance(value, torch.optim.Optimizer):
            return Stateful(type(value), self._state(value.state_dict(), path, depth))
        if generator_kind(value) is not None:
            return capture_generator(value)
        if is_array(value):
            return _array(value)
        if is_iterator(value):
            cursor = capture_iterator(value)
            return cursor if cursor.copy is not None else self._uncopied(value, path, cursor)
        return self._container(value, path, depth)

    def _uncopied(self, value: Any, path: str, node: Node) -> Node:
        self.uncopied[path] = type(value).__name__
        return node

    def _tensor(self, value: Tensor, path: str) -> Node:
        if is_lazy(value) or value.device.type == "meta":
            return _opaque(value)
        if value.layout not in _LAYOUTS or value.is_nested:
            return self._uncopied(value, path, _opaque(value))
        real = value.detach()
        strided = real.layout is torch.strided
        storage = real.untyped_storage().data_ptr() if strided else 0
        sparse_dim = real.sparse_dim() if real.layout is torch.sparse_coo else 0
        load, digest = self._keep(real if strided else real.to_dense())
        return TensorNode(
            value.dtype,
            tuple(value.shape),
            value.device,
            isinstance(value, nn.Parameter),
            value.requires_grad,
            value.layout,
            sparse_dim,
            storage,
            load,
            digest,
        )

    def _container(self, value: Any, path: str, depth: int) -> Node:
        if isinstance(value, dict):
            items = {
                self._key(key, f"{path} key {index}", depth): self.node(item, f"{path}[{key!r}]", depth + 1)
                for index, (key, item) in enumerate(value.items())
            }
            return Container("dict", type(value), items, getattr(value, "default_factory", None))
        if isinstance(value, (list, tuple, collections.deque)):
            return self._sequence(value, path, depth)
        if isinstance(value, (set, frozenset)):
            # without an order nothing names an object that was not met before
            named = {self._seen.get(id(item)): item for item in value}
            kept = {Alias(met): Alias(met) for met in named if met is not None}
            return Container("set", type(value), kept | {item: Plain(item) for item in value if names_itself(item)})
        return self._object(value, path, depth)

    def _sequence(self, value: Any, path: str, depth: int) -> Node:
        kind = "tuple" if isinstance(value, tuple) else "list"
        limit = value.maxlen if isinstance(value, collections.deque) else None
        if len(value) > _LONG and all(map(is_plain, value)):
            return Values(kind, type(value), tuple(value), limit)
        names = getattr(type(value), "_fields", None)
        places = [f".{name}" for name in names] if names else [f"[{index}]" for index in range(len(value))]
        items = {i: self.node(item, path + places[i], depth + 1) for i, item in enumerate(value)}
        return Container(kind, type(value), items, limit)

    def _key(self, key: Any, path: str, depth: int) -> Any:
        """Name a key that is an object by where that was met; by its place in the dict if that is here."""
        if names_itself(key):
            return key
        self.node(key, path, depth + 1)
        return Alias(self._seen.get(id(key), path))

    def _object(self, value: Any, path: str, depth: int) -> Node:
        if not is_looked_into(type(value)):
            if is_stateful(value):
                try:
                    state = value.state_dict()
                except (AttributeError, NotImplementedError):  # accelerate's loaders, which have a state only at times
                    return self._library_object(value, path, depth)
                return Stateful(type(value), self._state(state, path, depth))
            return self._library_object(value, path, depth)
        held = state_attributes(value)
        items = {name: self.node(attribute, f"{path}.{name}", depth + 1) for name, attribute in held.items()}
        return Container("object", type(value), items)

    def _state(self, state: Any, path: str, depth: int) -> Node:
        self.meet(state, path)
        return self._container(state, path, depth) if isinstance(state, dict) else self.node(state, path, depth + 1)

    def _library_object(self, value: Any, path: str, depth: int) -> Node:
        """Look into a library's object only for what moves: generators, iterators, stateful and the person's objects.

        Its numbers and strings are its own business: a logger's level, a file's position, a timer.
        """
        items = {}
        members = attributes_of(value)
        # a loader's own names for what its samplers hold too
        for name in sorted(members, key=lambda name: name not in ("dataset", "generator")):
            held = members[name]
            if not is_plain(held) and not isinstance(held, (Tensor, dict, list, set, nn.Module)):
                node = self.node(held, f"{path}.{name}", depth + _LIBRARY_LEVEL)
                if not isinstance(node, (Opaque, Plain)) and (not isinstance(node, Container) or node.items):
                    items[name] = node
        return Container("object", type(value), items) if items else _opaque(value)

    def module(self, module: nn.Module, path: str, depth: int = 0) -> Container:
        """Make a node of a module: its tensors by name, its modes, and the attributes that its author gave it."""
        weights = {name: self._named(tensor, f"{path}.{name}") for name, tensor in module_tensors(module).items()}
        parts = module_names(module)
        for name, part in parts.items():
            self.meet(part, f"{path}.{name}" if name else path)
        attributes: dict[Any, Node] = {}
        for name, part in parts.items():
            place = f"{path}.{name}" if name else path
            own = module_attributes(part)
            if own:
                items = {key: self.node(value, f"{place}.{key}", depth + 1) for key, value in own.items()}
                attributes[name] = Container("object", type(part), items)
        return Container(
            "module",
            type(module),
            {
                "weights": Container("weights", dict, weights),
                "trainable": Container("dict", dict, _trainable(module)),
                "modes": Container("dict", dict, {name: Plain(part.training) for name, part in parts.items()}),
                "attributes": Container("parts", dict, attributes),
            },
        )

    def _named(self, tensor: Tensor, path: str) -> Node:
        met = self.knows(tensor)
        if met is not None:
            return Alias(met)
        self.meet(tensor, path)
        made = self.nodes[path] = self._tensor(tensor, path)
        return made


def state_attributes(value: Any) -> dict[str, Any]:
    """Return those attributes of an object that are state: of a dataset, its samples, which may be many, are not."""
    held = attributes_of(value)
    return {name: item for name, item in held.items() if not _is_bulk(item)} if isinstance(value, Dataset) else held


def _is_bulk(value: Any) -> bool:
    if isinstance(value, Tensor) or is_array(value):
        return True
    return isinstance(value, (list, tuple, dict)) and len(value) > _LONG


def _array(value: Any) -> Node:
    if value.dtype.hasobject:
        return _opaque(value)
    content = value.copy()
    content.flags.writeable = False
    return Array(content)


def _trainable(module: nn.Module) -> dict[Any, Node]:
    """Return which parameters require a gradient, by name."""
    tensors = module_tensors(module).items()
    return {name: Plain(tensor.requires_grad) for name, tensor in tensors if isinstance(tensor, nn.Parameter)}


def _opaque(value: Any) -> Opaque:
    """Make a node of what is not looked into; only what cannot hold a setup is kept, so that none lives on in it."""
    closed = isinstance(value, types.FunctionType) and not value.__closure__
    kept = closed or isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType))
    return Opaque(type(value).__name__, value if kept else None)
