"""Builds what a node stands for, out of what is there."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup, module_names
from tl_telemetry._capture._generators import put_back_generator
from tl_telemetry._capture._iterators import copy_iterator
from tl_telemetry._capture._kinds import is_looked_into, is_plain, names_itself
from tl_telemetry._capture._modules import module_attributes, module_tensors
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
from tl_telemetry._capture._objects import blank, delete_attribute, set_attribute
from tl_telemetry._capture._pieces import StateCapture
from tl_telemetry._capture._reuse import Reuse, fits_array
from tl_telemetry._capture._walk import state_attributes
from tl_telemetry._tensors import is_lazy

MISSING: Any = object()  # nothing is there; or, as an answer, nothing can be built


class Build:
    """One act of putting back: what was built for one place is used wherever an alias refers to it.

    Attributes:
        capture: where the values come from.
    """

    def __init__(self, capture: StateCapture, setup: TrainingSetup) -> None:
        self.capture = capture
        self._reuse = Reuse(capture, setup)
        self._made: dict[int, Any] = {}  # by the id of the node

    def value(self, node: Node, live: Any) -> Any:
        """Return what belongs in a place.

        Args:
            node: what the capture has there.
            live: what is there now; ``MISSING`` for nothing.

        Returns:
            The object that is there, changed in place, or a new one. Where none can be built, what is there.
        """
        if isinstance(node, Plain):
            return node.value
        if isinstance(node, Opaque):
            return live if node.value is None or type(live).__name__ == node.type_name else node.value
        if isinstance(node, Alias):
            return self._alias(node, live)
        if id(node) in self._made:  # an alias needed it earlier
            return self._made[id(node)]
        made = self._built(node, live)
        if made is MISSING:
            return live
        self._made[id(node)] = made
        return made

    def _alias(self, node: Alias, live: Any) -> Any:
        target = self.capture.nodes.get(node.path)
        if target is not None and id(target) in self._made:
            return self._made[id(target)]
        there = self._reuse.known.get(node.path, MISSING)
        if there is not MISSING and (target is None or self._reuse.stays(target, there)):
            return there  # of a piece that may not be put back now
        return live if target is None else self.value(target, live)

    def _built(self, node: Node, live: Any) -> Any:
        if isinstance(node, TensorNode):
            return self._tensor(node, live)
        if isinstance(node, Cursor):
            return MISSING if node.copy is None else copy_iterator(node.copy)
        if live is not MISSING and not is_plain(live) and not self._reuse.allows(node, live):
            live = MISSING
        if isinstance(node, Array):
            return _array(node.content, live)
        if isinstance(node, Generator):
            return put_back_generator(node, live)
        if isinstance(node, Stateful):
            if not _is_of(node.type, live):
                return MISSING
            live.load_state_dict(self.value(node.state, MISSING))
            return live
        if isinstance(node, Values):
            return _filled(node, live, list(node.values))
        assert isinstance(node, Container)
        if node.kind == "dict":
            return self._dict(node, live)
        if node.kind == "set":
            return self._set(node, live)
        if node.kind in ("list", "tuple"):
            return self._sequence(node, live)
        return self._module(node, live) if node.kind == "module" else self._object(node, live)

    def _tensor(self, node: TensorNode, live: Any) -> Any:
        content = node.content()
        if node.layout is torch.sparse_coo:
            content = content.to_sparse(node.sparse_dim)
        elif node.layout is not torch.strided:
            content = content.to_sparse(layout=node.layout)
        if self._reuse.allows_tensor(node, live):
            live.detach().copy_(content)
            return live
        made = content.to(node.device, copy=True)
        return nn.Parameter(made, node.requires_grad) if node.parameter else made.requires_grad_(node.requires_grad)

    def _dict(self, node: Container, live: Any) -> Any:
        if not _is_of(node.type, live):
            live = _empty(node)
        if isinstance(live, collections.defaultdict):
            live.default_factory = node.made_with
        self._made[id(node)] = live  # before what is below it, which may refer back
        old = list(live)
        keys = [self._key(key, old[i] if i < len(old) else MISSING) for i, key in enumerate(node.items)]
        there = [live.get(key, MISSING) for key in keys]
        made = [self.value(value, held) for value, held in zip(node.items.values(), there, strict=True)]
        live.clear()
        for key, value in zip(keys, made, strict=True):
            if key is not MISSING and value is not MISSING:
                live[key] = value
        return live

    def _key(self, key: Any, live: Any) -> Any:
        if not isinstance(key, Alias):
            return key
        hashes: tuple[Any, ...] = (object.__hash__, Tensor.__hash__)
        one_of_its_kind = type(live).__hash__ in hashes  # others must not change while they are keys
        return self._alias(key, live if one_of_its_kind else MISSING)

    def _set(self, node: Container, live: Any) -> Any:
        cls: Any = node.type
        made = {self._key(key, MISSING) for key in node.items} - {MISSING}
        if isinstance(live, (set, frozenset)):  # what no capture can name stays
            ids = {id(value) for value in self._reuse.known.values()}
            made |= {item for item in live if not names_itself(item) and id(item) not in ids}
        if not _is_of(cls, live) or not hasattr(live, "clear"):
            return cls(made)
        live.clear()
        live.update(made)
        return live

    def _sequence(self, node: Container, live: Any) -> Any:
        old = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
        if node.kind == "list":
            live = live if _is_of(node.type, live) else _empty(node)
            self._made[id(node)] = live
        old += [MISSING] * (len(node.items) - len(old))
        made = [self.value(item, held) for item, held in zip(node.items.values(), old, strict=False)]
        return _filled(node, live, [None if item is MISSING else item for item in made])

    def _object(self, node: Container, live: Any) -> Any:
        if not _is_of(node.type, live):
            try:
                live = blank(node.type)
            except TypeError:
                return MISSING
        self._made[id(node)] = live
        held = state_attributes(live)
        if is_looked_into(type(live)):
            for name in held.keys() - node.items.keys():
                delete_attribute(live, name)
        for name, value in node.items.items():
            made = self.value(value, held.get(name, MISSING))
            if made is not MISSING:
                set_attribute(live, name, made)
        return live

    def _module(self, node: Container, live: Any) -> Any:
        if not isinstance(live, nn.Module):
            return MISSING
        self.weights(live, node.items["weights"])
        self.trainable(live, node.items["trainable"])
        self.modes(live, node.items["modes"])
        self.module_attributes(live, node.items["attributes"])
        return live

    def weights(self, module: nn.Module, node: Node) -> None:
        """Put the content of parameters and buffers back; the tensors stay the same ones."""
        assert isinstance(node, Container)
        for name, tensor in module_tensors(module).items():
            held = node.items.get(name)
            if not isinstance(held, TensorNode):  # tied, and put back under its first name
                continue
            if is_lazy(tensor):
                tensor.materialize(held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
            made = self.value(held, tensor)
            if made is not tensor and tensor.device.type != "meta":  # of another shape
                tensor.data = made.data

    def trainable(self, module: nn.Module, node: Node) -> None:
        """Freeze and unfreeze parameters."""
        assert isinstance(node, Container)
        for name, tensor in module_tensors(module).items():
            held = node.items.get(name)
            if isinstance(held, Plain) and tensor.is_leaf and not is_lazy(tensor):
                tensor.requires_grad_(held.value)

    def modes(self, module: nn.Module, node: Node) -> None:
        """Put each module into training or eval mode."""
        assert isinstance(node, Container)
        for name, part in module_names(module).items():
            mode = node.items.get(name)
            if isinstance(mode, Plain):
                part.training = mode.value

    def module_attributes(self, module: nn.Module, node: Node) -> None:
        """Put the plain attributes of modules back, and delete those that came later."""
        assert isinstance(node, Container)
        for name, part in module_names(module).items():
            held = node.items.get(name)
            items = held.items if isinstance(held, Container) else {}
            live = module_attributes(part)
            for attribute in live.keys() - items.keys():
                del vars(part)[attribute]
            for attribute, value in items.items():
                made = self.value(value, live.get(attribute, MISSING))
                if made is not MISSING:
                    vars(part)[attribute] = made


def _is_of(cls: type, value: Any) -> bool:
    return type(value) is cls


def _array(content: Any, live: Any) -> Any:
    if fits_array(content, live):
        live[...] = content
        return live
    return content.copy()


def _filled(node: Container | Values, live: Any, items: list[Any]) -> Any:
    """Return a list, deque or tuple with these items: the one that is there if it can be changed."""
    if node.kind == "tuple":
        return node.type._make(items) if hasattr(node.type, "_make") else _tuple(node.type, items)
    fits = _is_of(node.type, live) and getattr(live, "maxlen", None) == node.made_with
    filled = live if fits else _empty(node)
    filled.clear()
    filled.extend(items)
    return filled


def _tuple(cls: Any, items: list[Any]) -> Any:
    try:
        return cls(items)
    except TypeError:  # a subclass that is made in another way
        return tuple(items)


def _empty(node: Container | Values) -> Any:
    """Make an empty dict, list or deque; a plain one where a class of the person's needs more for it."""
    cls: Any = node.type
    try:
        if issubclass(cls, collections.deque):
            return cls(maxlen=node.made_with)
        return cls() if node.made_with is None else cls(node.made_with)
    except TypeError:
        return {} if node.kind == "dict" else []
