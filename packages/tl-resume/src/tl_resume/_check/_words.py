"""Words for pieces and differences, as messages use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tl_core import group_names
from tl_resume._check._evidence import Evidence
from tl_resume._check._parting import Parting
from tl_telemetry import Divergence, Piece, StateDifference, own_object

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
        "trainable": "requires_grad of the parameters",
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
    if piece.kind == "gradients":
        return f"the gradient of {below(difference)}"
    if piece.kind in ("weights", "trainable", "modes", "optimizer state"):
        return below(difference)
    if piece.kind == "module attributes":
        return ".".join(["setup.model", *(str(part) for part in path if part != "")])
    if piece.kind == "outside":
        return _outside(piece.name, path)
    return title(piece) + (_attributes(path) if piece.kind in ("state", "attribute") else f" {below(difference)}")


def below(difference: StateDifference) -> str:
    """Name the place of a difference below its piece, whose title was said before."""
    piece, path = difference.piece, difference.path
    if not path:
        return ""
    if piece.kind in ("weights", "gradients", "trainable"):
        return str(path[0])
    if piece.kind == "modes":
        return str(path[0]) or "the model"
    if piece.kind == "param groups":
        return f"group {path[0]} {_dotted(path[1:])}".rstrip()
    if piece.kind == "optimizer state":
        return " ".join(map(str, path))
    if piece.kind in ("scheduler", "scaler", "optimizer attributes"):
        return _dotted(path)
    return _attributes(path).removeprefix(".")


def _outside(name: str, path: Sequence[object]) -> str:
    """Write a place outside of the setup: ``COUNT``, ``seen (closure of step)``, ``Trainer.seen (the object ...)``."""
    if (own := own_object(name)) is not None:
        return f"{own[1]}{_attributes(path)} (the object that {own[0]} is bound to)"
    bare, bracket, rest = name.partition(" (")
    return bare + _attributes(path) + bracket + rest


def _attributes(path: Sequence[object]) -> str:
    if len(path) == 2 and path[0] == "weights" and isinstance(path[1], str):  # a module's parameter or buffer
        return f".{path[1]}"
    if len(path) > 2 and path[0] == "attributes" and isinstance(path[1], str):  # a module's plain attribute
        return (f".{path[1]}" if path[1] else "") + _attributes(path[2:])
    return "".join(f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in path)


def _dotted(path: Sequence[object]) -> str:
    return str(path[0]) + _attributes(path[1:]) if path else ""


def values(
    differences: Sequence[StateDifference],
    *,
    then: str = "when saved",
    now: str = "after loading",
    name: Callable[[StateDifference], str] = place,
) -> str:
    """Say what some differences are: ``lr 0.05 when saved, 0.1 after loading``, the first ones only."""
    tensors = [d for d in differences if d.tensor is not None and d.tensor.num_elements > 1]
    rest = [d for d in differences if len(tensors) < 2 or d not in tensors]
    shown = [one(difference, then=then, now=now, name=name) for difference in rest[:_MAX_SHOWN]]
    if len(tensors) > 1:
        shown.insert(0, f"{len(tensors)} tensors differ, {one(tensors[0], then=then, now=now, name=name)}")
    hidden = len(rest) - _MAX_SHOWN
    return "; ".join(shown) + (f"; and {hidden} more" if hidden > 0 else "")


def one(
    difference: StateDifference,
    *,
    then: str = "when saved",
    now: str = "after loading",
    name: Callable[[StateDifference], str] = place,
) -> str:
    """Say what one difference is."""
    where = name(difference)
    lead = f"{where} " if where else ""
    tensor = difference.tensor
    if tensor is not None:
        a, b = (f"{value:.6g}" for value in tensor.values)
        if tensor.num_elements == 1:
            return f"{lead}{a} {then}, {b} {now}"
        index = ", ".join(map(str, tensor.index))
        count = f"{tensor.num_different} of {tensor.num_elements} elements"
        return f"{where + ': ' if where else ''}{count}, the most at [{index}]: {a} {then}, {b} {now}"
    if difference.piece.kind == "modes":
        modes = {True: "in training mode", False: "in eval mode"}
        a, b = (modes.get(value, "missing") for value in (difference.plain_a, difference.plain_b))
        return f"{lead}{a} {then}, {b} {now}"
    if difference.kind == "generator":
        return f"{lead}in another state {now} than {then}"
    left, right = difference.shown_a, difference.shown_b
    if left == right:  # equal values of two dtypes
        left, right = (f"{text}{_dtype(node)}" for text, node in ((left, difference.a), (right, difference.b)))
    return f"{lead}{left} {then}, {right} {now}"


def _dtype(node: object) -> str:
    dtype = getattr(node, "dtype", None)
    return "" if dtype is None else f" ({str(dtype).removeprefix('torch.')})"


def tensor_names(differences: Iterable[StateDifference], everything: Iterable[str]) -> str:
    """Write the names of tensors shortly, grouped by module."""
    return group_names(dict.fromkeys(str(d.path[0]) for d in differences if d.path), everything)


def module_names(differences: Iterable[StateDifference]) -> str:
    """Write the names of modules whose modes differ: ``the model and 3 of its modules``, or by name."""
    names = [str(d.path[0]) for d in differences]
    if "" not in names:
        return group_names(names, names)
    return "the model" + (f" and {len(names) - 1} of its modules" if len(names) > 1 else "")


def parting(found: Parting) -> str:
    """Say where the resumed run parts from the uninterrupted one."""
    if found.raised:
        return f"the resumed run raises {found.raised} in step {found.step}, where the uninterrupted one goes on"
    if found.state is not None:
        at_end = one(found.state, then="without interruption", now="resumed", name=lambda _: "")
        return f"losses and weights agree, and at the end of the run {place(found.state)} differs ({at_end})"
    assert found.figure is not None
    return figures_part(found.figure)


def figures_part(found: Divergence, kind: str = "resumed") -> str:
    """Say in which loss or weight two runs part."""
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


def established(evidence: Evidence, piece: Piece) -> str:
    """Say that the runs part, and how it was established that a piece makes them."""
    found, cause = evidence.diverged, evidence.cause
    assert found is not None
    assert cause is not None
    others = [other for other in cause.pieces if other != piece]
    with_it = f"with {listed([piece, *others])} put back" if others else "with it put back"
    if cause.enough:
        return f"; {parting(found)}; {with_it} after loading, the resumed run is the uninterrupted one"
    return f"; {parting(found)}; with every difference put back they do not, with all but this one put back they do"
