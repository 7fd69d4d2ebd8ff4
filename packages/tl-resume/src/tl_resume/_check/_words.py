"""Words for pieces and differences, as messages use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tl_core import group_names
from tl_telemetry import Divergence, Piece, StateDifference

_MAX_SHOWN = 4
_RNG = {
    "python": "python's global generator (random)",
    "numpy": "numpy's global generator",
    "torch": "torch's generator",
}


def title(piece: Piece) -> str:
    """Name a piece as the person would."""
    named = {
        "weights": "the model's weights",
        "modes": "the modes of the modules",
        "module attributes": "attributes of the model's modules",
        "optimizer state": f"the state of optimizer {piece.name!r}",
        "param groups": f"the param_groups of optimizer {piece.name!r}",
        "optimizer attributes": f"attributes of optimizer {piece.name!r}",
        "scheduler": f"scheduler {piece.name!r}",
        "scaler": "the GradScaler",
        "state": f"setup.state[{piece.name!r}]",
        "attribute": f"setup.{piece.name}",
        "gradients": "the gradients",
        "rng": _RNG.get(piece.name, f"the generator of {piece.name}"),
        "outside": piece.name,
    }
    return named[piece.kind]


def place(difference: StateDifference) -> str:
    """Name the place of a difference as the person would write it."""
    piece, path = difference.piece, difference.path
    if piece.kind in ("weights", "gradients"):
        return str(path[0]) if path else title(piece)
    if piece.kind == "modes":
        return f"{path[0] or 'model'}.training"
    if piece.kind == "param groups":
        return f"optimizer {piece.name!r} group {path[0]}: {_rest(path[1:])}" if path else title(piece)
    if piece.kind == "optimizer state":
        return f"{path[0]}{''.join(f' {part}' for part in path[1:])}" if path else title(piece)
    if piece.kind == "module attributes":
        return ".".join(["setup.model", *(str(part) for part in path if part != "")])
    if piece.kind == "outside":
        return piece.name.split(" (")[0] + _attributes(path) + _bracket(piece.name)
    return title(piece) + _attributes(path)


def _bracket(name: str) -> str:
    return " (" + name.split(" (", 1)[1] if " (" in name else ""


def _attributes(path: Sequence[object]) -> str:
    return "".join(f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in path)


def _rest(path: Sequence[object]) -> str:
    return str(path[0]) + _attributes(path[1:]) if path else ""


def values(differences: Sequence[StateDifference], *, then: str = "when saved", now: str = "after loading") -> str:
    """Say what some differences are: ``lr 0.05 when saved, 0.1 after loading``, the first ones only."""
    tensors = [d for d in differences if d.tensor is not None and d.tensor.num_elements > 1]
    rest = [d for d in differences if len(tensors) < 2 or d not in tensors]
    shown = [one(difference, then=then, now=now) for difference in rest[:_MAX_SHOWN]]
    if len(tensors) > 1:
        shown.insert(0, f"{len(tensors)} tensors differ, {one(tensors[0], then=then, now=now)}")
    hidden = len(rest) - _MAX_SHOWN
    return "; ".join(shown) + (f"; and {hidden} more" if hidden > 0 else "")


def one(difference: StateDifference, *, then: str = "when saved", now: str = "after loading") -> str:
    """Say what one difference is."""
    where = place(difference)
    tensor = difference.tensor
    if tensor is not None and tensor.num_elements > 1:
        a, b = (f"{value:.6g}" for value in tensor.values)
        index = ", ".join(map(str, tensor.index))
        count = f"{tensor.num_different} of {tensor.num_elements} elements differ"
        return f"{where}: {count}, the most at [{index}] ({a} {then}, {b} {now})"
    if tensor is not None:
        a, b = (f"{value:.6g}" for value in tensor.values)
        return f"{where}: {a} {then}, {b} {now}"
    if difference.kind == "generator":
        return f"{where}: in another state {now} than {then}"
    if difference.piece.kind == "modes":
        modes = {True: "training", False: "eval"}
        a, b = (modes.get(value, "nothing") for value in (difference.plain_a, difference.plain_b))
        return f"{where.removesuffix('.training')}: {a} mode {then}, {b} mode {now}"
    return f"{where}: {difference.shown_a} {then}, {difference.shown_b} {now}"


def tensor_names(differences: Iterable[StateDifference], everything: Iterable[str]) -> str:
    """Write the names of tensors shortly, grouped by module."""
    return group_names(dict.fromkeys(str(d.path[0]) for d in differences if d.path), everything)


def parting(found: Divergence, kind: str = "resumed") -> str:
    """Say where two runs part."""
    a, b = ("nothing" if value is None else f"{value:.6g}" for value in (found.a, found.b))
    if found.is_loss:
        name = found.what if found.what == "loss" else f"loss {found.what!r}"
        return f"the runs part at step {found.step}: {name} {b} {kind}, {a} without interruption"
    return f"the runs part at step {found.step}: after it, {found.what} has norm {b} {kind}, {a} without interruption"


def listed(pieces: Iterable[Piece]) -> str:
    """Write pieces as a list in words."""
    return listed_names(map(title, pieces))


def listed_names(given: Iterable[object]) -> str:
    """Write names as a list in words."""
    names = [str(name) for name in given]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
