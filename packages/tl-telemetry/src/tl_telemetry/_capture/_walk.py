"""Walks from a root through the objects below it, and makes a node of each."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import parameter_names
from tl_telemetry._capture._kinds import (
    IMMUTABLE,
    cursor,
    generator_kind,
    generator_state,
    is_array,
    is_iterator,
    is_library,
    is_stateful,
)
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
from tl_telemetry._tensors import is_lazy

# Takes a tensor (dense, detached) and returns what gives its content back on the CPU (None: nothing does), and a digest
# of its bytes (None: there is none). Equal digests stand for equal contents.
Keep = Callable[[Tensor], tuple[Callable[[], Tensor] | None, bytes | None]]

# What torch's modules keep beside parameters and buffers is construction or machinery; so are these of any module.
_MODULE_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_MAX_DEPTH = 60


def keep_in_memory(tensor: Tensor) -> tuple[Callable[[], Tensor] | None, bytes | None]:
    """Keep a tensor's content as a copy on the CPU."""
    copied = tensor.detach().to("cpu", copy=True)
    return lambda: copied, None


def opaque(value: Any) -> Opaque:
    """Make a node of a thing that is not looked into."""
    return Opaque(type(value).__name__, value)


class Walk:
    """One capture's walk; what was met before becomes an ``Alias``, over all roots.

    Attributes:
        uncopied: paths of what could not be copied (generators, iterators of a DataLoader), with its type.
        nodes: the node made of what was met at each path, for the aliases.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # an id is good only as long as its object lives
        self.uncopied: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}

    def knows(self, value: Any) -> str | None:
        """Return the path under which an object was met; None if it was not."""
        return self._seen.get(id(value))

    def meet(self, value: Any, path: str) -> None:
        """Remember an object, so that it is an alias wherever it is met again."""
        self._seen.setdefault(id(value), path)
        self._alive.append(value)

    def node(self, value: Any, path: str, depth: int = 0) -> Node:
        """Make a node of a value and of what is below it."""
        if isinstance(value, IMMUTABLE):
            return Plain(value)
        if (met := self._seen.get(id(value))) is not None and met != path:  # a root is met before it is walked
            return Alias(met)
        if isinstance(value, (types.ModuleType, types.FunctionType, type, types.BuiltinFunctionType, types.MethodType)):
            return opaque(value)
        if depth > _MAX_DEPTH:
            return opaque(value)
        self.meet(value, path)
        made = self.nodes[path] = self._made(value, path, depth)
        return made

    def _made(self, value: Any, path: str, depth: int) -> Node:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self.module(value, path, depth)
        if isinstance(value, torch.optim.Optimizer):
            return Stateful(type(value), self._state_dict(value, path, depth))
        if generator_kind(value) is not None:
            return Generator(str(generator_kind(value)), generator_state(value))
        if is_array(value):
            return Plain((str(value.dtype), value.shape, value.tobytes())) if value.dtype.kind != "O" else opaque(value)
        if is_iterator(value):
            return self._iterator(value, path)
        return self._container(value, path, depth)

    def _tensor(self, value: Tensor) -> Node:
        if is_lazy(value) or value.device.type == "meta":
            return opaque(value)
        real = value.detach()
        if real.layout is not torch.strided:
            real = real.to_dense()
        load, digest = self._keep(real)
        parameter = isinstance(value, nn.Parameter)
        return TensorNode(value.dtype, tuple(value.shape), value.device, parameter, value.requires_grad, load, digest)

    def _iterator(self, value: Iterator[Any], path: str) -> Node:
        position, copied = cursor(value)
        if copied is None and hasattr(value, "close") is isinstance(value, types.GeneratorType):
            self.uncopied[path] = type(value).__name__
        return Cursor(type(value).__name__, position, copied)

    def _container(self, value: Any, path: str, depth: int) -> Node:
        if isinstance(value, dict):
            items = {self._key(key): self.node(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
            return Container("dict", type(value), items)
        if isinstance(value, (list, tuple, collections.deque)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            if len(value) > 8 and all(isinstance(item, IMMUTABLE) for item in value):
                return Container(kind, type(value), {None: Plain(tuple(value))})
            names = getattr(value, "_fields", None)
            places = [f".{name}" for name in names] if names else [f"[{index}]" for index in range(len(value))]
            items = {i: self.node(item, path + places[i], depth + 1) for i, item in enumerate(value)}
            return Container(kind, type(value), items)
        if isinstance(value, (set, frozenset)):
            kept = {item: Plain(item) for item in value if isinstance(item, (*IMMUTABLE, tuple))}
            return Container("set", type(value), kept)
        return self._object(value, path, depth)

    def _key(self, key: Any) -> Any:
        """Name a key that is an object by where that was met."""
        return key if isinstance(key, (*IMMUTABLE, tuple, frozenset)) else Alias(self._seen.get(id(key), "?"))

    def _object(self, value: Any, path: str, depth: int) -> Node:
        library = is_library(type(value)) and not isinstance(value, types.SimpleNamespace)
        if library and type(value).__module__ != "argparse":
            if is_stateful(value):
                return Stateful(type(value), self._state_dict(value, path, depth))
            return self._library_object(value, path, depth)
        return Container("object", type(value), self.attributes(value, path, depth))

    def _state_dict(self, value: Any, path: str, depth: int) -> Node:
        state = value.state_dict()
        self.meet(state, path)
        return self._container(state, path, depth) if isinstance(state, dict) else self.node(state, path, depth + 1)

    def _library_object(self, value: Any, path: str, depth: int) -> Node:
        """Look into a library's object only for what moves: generators, iterators, stateful and the person's objects.

        Its numbers and strings are its own business: a logger's level, a file's position, a timer.
        """
        items = {}
        for name, held in list(getattr(value, "__dict__", {}).items()):
            below = held is not None and not isinstance(held, (*IMMUTABLE, Tensor, dict, list, set))
            if below and not isinstance(held, nn.Module) and name != "dataset":
                node = self.node(held, f"{path}.{name}", depth + 10)
                if not isinstance(node, (Opaque, Plain)) and (not isinstance(node, Container) or node.items):
                    items[name] = node
        return Container("object", type(value), items) if items else opaque(value)

    def attributes(self, value: Any, path: str, depth: int = 0) -> dict[Any, Node]:
        """Make nodes of an object's attributes (of ``__dict__`` and of slots)."""
        return {name: self.node(held, f"{path}.{name}", depth + 1) for name, held in attributes_of(value).items()}

    def module(self, module: nn.Module, path: str, depth: int = 0) -> Node:
        """Make a node of a module: its tensors by name, its modes, and the attributes that its author gave it."""
        weights = {name: self._named(tensor, f"{path}.{name}") for name, tensor in module_tensors(module).items()}
        modes = {name: Plain(part.training) for name, part in module_parts(module)}
        attributes: dict[Any, Node] = {}
        for name, part in module_parts(module):
            self.meet(part, f"{path}.{name}" if name else path)
        for name, part in module_parts(module):
            own = self._module_attributes(part, f"{path}.{name}" if name else path, depth)
            if own:
                attributes[name] = Container("object", type(part), own)
        return Container(
            "module",
            type(module),
            {
                "weights": Container("weights", dict, weights),
                "modes": Container("dict", dict, modes),
                "attributes": Container("parts", dict, attributes),
            },
        )

    def _named(self, tensor: Tensor, path: str) -> Node:
        met = self.knows(tensor)
        if met is not None:
            return Alias(met)
        self.meet(tensor, path)
        made = self.nodes[path] = self._tensor(tensor)
        return made

    def _module_attributes(self, part: nn.Module, path: str, depth: int) -> dict[Any, Node]:
        if is_library(type(part)):
            return {}
        held = {name: value for name, value in vars(part).items() if name not in _MODULE_MACHINERY}
        held.pop("training", None)
        return {name: self.node(value, f"{path}.{name}", depth + 1) for name, value in held.items()}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds, in ``__dict__`` and in slots."""
    held = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                held.setdefault(slot, getattr(value, slot))
    return held


def module_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of a model by name, what wraps them left out of the names."""
    return list(clean_module_names(module).items())


def clean_module_names(module: nn.Module) -> Mapping[str, nn.Module]:
    """Name the modules as ``parameter_names`` names their parameters; of a wrapper, only what it wraps."""
    names: dict[str, nn.Module] = {}
    for raw, part in module.named_modules():
        kept = ".".join(piece for piece in raw.split(".") if piece != "_orig_mod")
        names[kept] = part  # a wrapper comes before what it wraps
    return names


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers (persistent or not) of a module by name, tied ones under each name."""
    tensors: dict[str, Tensor] = dict(parameter_names(module, remove_duplicate=False))
    for raw, buffer in module.named_buffers(remove_duplicate=False):
        name = ".".join(piece for piece in raw.split(".") if piece != "_orig_mod")
        tensors.setdefault(name, buffer)
    return tensors
