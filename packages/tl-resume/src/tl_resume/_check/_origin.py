"""Says where the values come from that lie at a wrong place after loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_telemetry import Piece, StateCapture, StateDifference

LOW_PRECISION = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Origin:
    """Where the wrong values come from; every differing tensor of the piece has the same origin.

    Attributes:
        kind: ``"fresh"`` (as ``make_setup`` built them: nothing was restored), ``"rounded"`` (the saved ones in lower
            precision), ``"end"`` (those of the end of the run that saved), ``"elsewhere"`` (another saved tensor).
        dtype: the lower precision, where it is that.
        source: the piece that the values come from, where they come from elsewhere.
        moves: for each place, the place that its value belongs to, where that is another one of the same piece.
    """

    kind: str
    dtype: str = ""
    source: Piece | None = None
    moves: tuple[tuple[str, str], ...] = ()


def origin(
    differences: Sequence[StateDifference], saved: StateCapture, fresh: StateCapture, end: StateCapture
) -> Origin | None:
    """Find where the tensors of one piece come from.

    Args:
        differences: what differs in the piece: saved against loaded.
        saved: the state when saved.
        fresh: digests of the fresh setup before loading.
        end: the state at the end of a run without interruption.

    Returns:
        The origin that explains all of them; None if none does.
    """
    tensors = [d for d in differences if d.tensor_a() is not None and d.tensor_b() is not None]
    if not tensors:
        return None
    if all(_at(fresh, d) is not None and _at(fresh, d) == _digest(d.b) for d in tensors):
        return Origin("fresh")
    for dtype in LOW_PRECISION:
        if all(is_rounded(d.tensor_a(), d.tensor_b(), dtype) for d in tensors):
            return Origin("rounded", dtype=str(dtype).removeprefix("torch."))
    if all(_at(end, d) == _digest(d.b) for d in tensors):
        return Origin("end")
    return _elsewhere(tensors, saved)


def is_rounded(exact: Tensor | None, other: Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether a tensor holds the values of an exact one, rounded to a dtype; its own dtype may be any."""
    if exact is None or other is None or not exact.is_floating_point() or not other.is_floating_point():
        return False
    return torch.equal(exact.to(dtype).to(torch.float64), other.to(torch.float64))


def _elsewhere(tensors: Sequence[StateDifference], saved: StateCapture) -> Origin | None:
    places: dict[bytes, list[tuple[Piece, tuple[Any, ...]]]] = {}
    for piece, path, digest in saved.digests():
        places.setdefault(digest, []).append((piece, path))
    sources: list[list[tuple[Piece, tuple[Any, ...]]]] = []
    zeros = 0
    for difference in tensors:
        own_digest = _digest(difference.b)
        found = places.get(own_digest, []) if own_digest is not None else []
        tensor = difference.tensor_b()
        if not found or tensor is None:
            return None
        zeros += not bool(tensor.any())
        sources.append(found)
    if zeros == len(tensors):  # an all-zero state is at home everywhere
        return None
    own = tensors[0].piece
    if not zeros and all(any(piece == own for piece, _ in found) for found in sources):
        moves = []
        for difference, found in zip(tensors, sources, strict=True):
            path = next(path for piece, path in found if piece == own)
            moves.append((".".join(map(str, difference.path)), ".".join(map(str, path))))
        return Origin("elsewhere", source=own, moves=tuple(moves))
    for piece in dict.fromkeys(piece for found in sources for piece, _ in found):
        if piece != own and piece.kind != "gradients" and all(any(p == piece for p, _ in found) for found in sources):
            return Origin("elsewhere", source=piece)
    return None


def _digest(node: Any) -> bytes | None:
    return getattr(node, "digest", None)


def _at(capture: StateCapture, difference: StateDifference) -> bytes | None:
    """Return the digest of the tensor that a capture has at a difference's place."""
    return capture.digest_at(difference.piece, difference.path)
