"""Puts pieces of a capture back into a setup, in place wherever it can."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry._capture._build import MISSING, Build
from tl_telemetry._capture._generators import put_back_generator
from tl_telemetry._capture._modules import module_tensors
from tl_telemetry._capture._nodes import Container, Generator, Node, Plain, TensorNode
from tl_telemetry._capture._objects import delete_attribute, set_attribute
from tl_telemetry._capture._pieces import Piece, StateCapture
from tl_telemetry._capture._setup_state import (
    named_parameters,
    named_state,
    numpy_generator,
    optimizer_attributes,
)
from tl_telemetry._capture._walk import Walk, keep_in_memory

# A scheduler or scaler restored after its optimizer writes nothing into it, but one built later may: groups come last.
_ORDER = (
    "weights",
    "trainable",
    "module attributes",
    "modes",
    "optimizer state",
    "optimizer attributes",
    "scheduler",
    "scaler",
    "state",
    "attribute",
    "gradients",
    "rng",
    "outside",
    "param groups",
)

Access = Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]]


def put_back(
    capture: StateCapture, setup: TrainingSetup | None, pieces: Iterable[Piece], *, outside: Access | None = None
) -> None:
    """Put pieces of a capture into a setup (the one it was taken of, or another one that is built alike).

    Tensors, dicts, lists and objects that are there are changed in place, so that whoever refers to them sees it; what
    is missing, or of another type, is built. What cannot be built stays as it is: a module, an optimizer, a library's
    scheduler that the setup lacks, an iterator that could not be copied.

    Args:
        capture: where the values come from; it can be used again afterwards.
        setup: the setup to change; None where only things outside of one are put back.
        pieces: which pieces. An entry of ``state`` or an attribute that the capture lacks is removed; of the other
            kinds, those that it lacks are left alone.
        outside: how to get and set each thing outside of the setup that was captured. ``get`` raises a LookupError
            where there is nothing.
    """
    there = TrainingSetup(nn.Module(), {}) if setup is None else setup
    rank = {kind: index for index, kind in enumerate(_ORDER)}
    build = Build(capture, there)
    with torch.no_grad():
        for piece in sorted(pieces, key=lambda p: rank.get(p.kind, len(rank))):
            node = capture.pieces.get(piece)
            if node is None:
                _remove(there, piece)
            else:
                _piece(build, there, piece, node, outside or {})


def _remove(setup: TrainingSetup, piece: Piece) -> None:
    if piece.kind == "state":
        setup.state.pop(piece.name, None)
    elif piece.kind == "attribute":
        vars(setup).pop(piece.name, None)


def _piece(build: Build, setup: TrainingSetup, piece: Piece, node: Node, outside: Access) -> None:
    kind, name = piece
    if kind == "weights":
        build.weights(setup.model, node)
    elif kind == "trainable":
        build.trainable(setup.model, node)
    elif kind == "modes":
        build.modes(setup.model, node)
    elif kind == "module attributes":
        build.module_attributes(setup.model, node)
    elif kind in ("optimizer state", "param groups", "optimizer attributes"):
        if name in setup.optimizers:
            _optimizer(build, setup, kind, setup.optimizers[name], node)
    elif kind == "scheduler":
        _entry(build, setup.schedulers, name, node)
    elif kind == "scaler":
        setup.scaler = build.value(node, setup.scaler)
    elif kind == "state":
        _entry(build, setup.state, name, node)
    elif kind == "attribute":
        _entry(build, vars(setup), name, node)
    elif kind == "gradients":
        _gradients(build, setup.model, node)
    elif kind == "rng":
        _set_rng(name, node)
    elif kind == "outside" and name in outside:
        get, store = outside[name]
        try:
            live = get()
        except LookupError:  # a global that was deleted, an empty cell
            live = MISSING
        if (made := build.value(node, live)) is not MISSING:
            store(made)


def _entry(build: Build, members: dict[str, Any], name: str, node: Node) -> None:
    made = build.value(node, members.get(name, MISSING))
    if made is not MISSING:
        members[name] = made


def _optimizer(build: Build, setup: TrainingSetup, kind: str, optimizer: Any, node: Node) -> None:
    assert isinstance(node, Container)
    if kind == "optimizer state":
        _optimizer_state(build, setup, optimizer, node)
    elif kind == "param groups":
        for group, held in zip(optimizer.param_groups, node.items.values(), strict=False):
            assert isinstance(held, Container)
            for key in [key for key in group if key not in held.items and key not in ("params", "param_names")]:
                del group[key]
            _entries(build, group, held)
    else:
        live = optimizer_attributes(optimizer)
        for name in live.keys() - node.items.keys():
            delete_attribute(optimizer, name)
        for name, value in node.items.items():
            if (made := build.value(value, live.get(name, MISSING))) is not MISSING:
                set_attribute(optimizer, name, made)


def _entries(build: Build, members: dict[str, Any], node: Container) -> None:
    for name, value in node.items.items():
        _entry(build, members, name, value)


def _optimizer_state(build: Build, setup: TrainingSetup, optimizer: Any, node: Container) -> None:
    walk = Walk(keep_in_memory)
    tensors = module_tensors(setup.model)
    for name, tensor in tensors.items():
        walk.meet(tensor, f"model.{name}")
    keys = {**tensors, **named_parameters(optimizer, walk)}
    live = named_state(optimizer, walk)
    optimizer.state.clear()
    for name, value in node.items.items():
        if (made := build.value(value, live.get(name, MISSING))) is not MISSING:
            optimizer.state[keys.get(name, name)] = made


def _gradients(build: Build, module: nn.Module, node: Node) -> None:
    assert isinstance(node, Container)
    for name, tensor in module_tensors(module).items():
        held = node.items.get(name)
        held = None if held is None else build.capture.resolve(held)
        tensor.grad = build.value(held, tensor.grad) if isinstance(held, TensorNode) else None


def _set_rng(name: str, node: Node) -> None:
    if isinstance(node, Generator):
        put_back_generator(node, numpy_generator())
        return
    assert isinstance(node, Plain)
    if name == "python":
        random.setstate(node.value)
        return
    state = torch.frombuffer(bytearray(node.value), dtype=torch.uint8)
    if name == "torch":
        torch.set_rng_state(state)
    else:
        kind, _, index = name.partition(":")
        getattr(torch, kind).set_rng_state(state, int(index))
