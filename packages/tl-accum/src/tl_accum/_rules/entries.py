"""The names of what is kept beside the model."""

from __future__ import annotations

from typing import Any

from tl_accum._compare import Comparison
from tl_telemetry import Piece


def entry(comparison: Comparison, piece: Piece, key: Any = None) -> str:
    """Return the person's name for a piece of the state, or for an attribute or entry of it."""
    setup = comparison.run.setup
    name, value = piece.name, setup.state.get(piece.name)
    if piece.kind == "state":
        name = f"setup.state[{piece.name!r}]"
        if key is None:
            return f"{name} ({type(value).__name__})"
    elif piece.kind == "attribute":
        name, value = f"setup.{piece.name}", getattr(setup, piece.name, None)
    elif piece.kind == "module attributes":
        part = f"setup.model.{key}" if key else "setup.model"
        return "what modules keep in attributes" if key is None else f"the attributes of {part}"
    if key is None:
        return name
    if piece.kind == "outside":
        return f"{name}: {key}"
    return f"{name}[{key!r}]" if isinstance(value, (dict, list, tuple)) else f"{name}.{key}"
