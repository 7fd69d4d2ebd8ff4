"""Gradients by parameter name, as vectors: sums, products, and how one is made up of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Vector = dict[str, Tensor]


# Those that torch computes in: float8 and complex32 only store.
_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def is_measured(tensor: Tensor) -> bool:
    """Tell whether a tensor holds what can be a little more or less, and not only the same or another: no integers."""
    return tensor.dtype in _MEASURED


def added(vectors: Iterable[Mapping[str, Tensor]], factors: Iterable[float] | None = None) -> Vector:
    """Return the sum of vectors, each times its factor; a parameter that one lacks is 0 there."""
    total: Vector = {}
    listed = list(vectors)
    for vector, factor in zip(listed, factors or [1.0] * len(listed), strict=True):
        for name, value in vector.items():
            part = value.double() * factor if not value.is_complex() else value * factor
            total[name] = total[name] + part if name in total else part
    return total


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Vector:
    """Return ``a - b``."""
    return added([a, b], [1.0, -1.0])


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the inner product in double precision."""
    return math.fsum(_dot(a[name], b[name]) for name in a.keys() & b.keys())


def norm(a: Mapping[str, Tensor]) -> float:
    """Return the L2 norm."""
    return math.sqrt(max(0.0, dot(a, a)))


def largest(a: Mapping[str, Tensor]) -> float:
    """Return the largest magnitude of all elements; 0 for nothing."""
    return max((float(value.abs().max()) for value in a.values() if value.numel()), default=0.0)


def is_finite(a: Mapping[str, Tensor]) -> bool:
    """Tell whether all elements are finite."""
    return all(bool(torch.isfinite(value).all()) for value in a.values())


def num_elements(a: Mapping[str, Tensor]) -> int:
    """Return how many elements all parameters have together."""
    return sum(value.numel() for value in a.values())


def only(a: Mapping[str, Tensor], names: Iterable[str]) -> Vector:
    """Return some of the parameters."""
    wanted = set(names)
    return {name: value for name, value in a.items() if name in wanted}


def agrees(a: Mapping[str, Tensor], b: Mapping[str, Tensor], rtol: float) -> bool:
    """Tell whether two vectors are one, up to ``rtol`` of the second one's length."""
    length = norm(b)
    return norm(minus(a, b)) <= rtol * length if length else norm(a) == 0.0


def ratio(a: Mapping[str, Tensor], b: Mapping[str, Tensor], rtol: float) -> float | None:
    """Return the factor by which ``a`` is ``b``, or None where it is no multiple of it."""
    square = dot(b, b)
    if not square:
        return None
    factor = dot(a, b) / square
    return factor if norm(added([a, b], [1.0, -factor])) <= rtol * max(norm(a), norm(b)) else None


def made_of(target: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], rtol: float) -> list[float] | None:
    """Return the factors that make a vector a sum of others, by least squares; None where it is no such sum.

    None too where the parts do not tell: with as many elements as parts or fewer, or parts that are alike, anything
    would fit.
    """
    if not parts or num_elements(target) <= 2 * len(parts):
        return None
    lengths = [norm(part) for part in parts]
    if not all(lengths):
        return None
    gram = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    scale = torch.tensor(lengths, dtype=torch.float64)
    gram = gram / scale[:, None] / scale[None, :]
    values = torch.linalg.eigvalsh(gram)
    if float(values[0]) < 1e-6 * float(values[-1]):
        return None
    right = torch.tensor([dot(part, target) for part in parts], dtype=torch.float64) / scale
    factors = (torch.linalg.solve(gram, right) / scale).tolist()
    rest = norm(minus(target, added(parts, factors)))
    return factors if rest <= rtol * norm(target) else None


def _dot(a: Tensor, b: Tensor) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return float(torch.dot(a.double().flatten(), b.double().flatten()))
