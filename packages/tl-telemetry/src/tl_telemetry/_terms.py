"""What a loss is made of: its terms, and what each of them is multiplied with, read off the graph of its root."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# How many terms of a sum of losses are looked at, and how many nodes below one in search of a scale.
MAX_TERMS = 32
MAX_SEARCHED = 400
MAX_DEPTH = 16

_MUL, _DIV, _COPY = "MulBackward0", "DivBackward0", "ToCopyBackward0"
SCALINGS = frozenset({_MUL, _DIV, _COPY})
_SUMS = frozenset({"AddBackward0", "SubBackward0"})
_REDUCTIONS = frozenset({"SumBackward0", "MeanBackward0"})  # of torch.stack(losses)
_STACKS = frozenset({"StackBackward0", "CatBackward0"})
_COMPILED = "CompiledFunctionBackward"
_LOW = (torch.float16, torch.bfloat16)


class Term(NamedTuple):
    """One term of a loss.

    Attributes:
        node: the graph node that made it, below what multiplies it.
        dtype: its own, or a narrower one that it is converted to; None where torch does not tell.
        scaler: the name of the scaler whose scale multiplies it; None: none was found.
        factors: scalars that multiply it: numbers, and tensors that may lie on a device.
        known: whether everything that multiplies it could be read.
    """

    node: Any
    dtype: torch.dtype | None
    scaler: str | None
    factors: tuple[float | Tensor, ...]
    known: bool


def terms(node: Any, output: int, scales: Mapping[int, str], *, search: bool) -> list[Term]:
    """Return the terms of a loss.

    Args:
        node: the graph node that made the loss.
        output: which of the node's outputs the loss is.
        scales: the names of scalers by where in memory their scale lies.
        search: whether to look further down for a scale where none is among the outermost factors.
    """
    found: list[Term] = []
    pending = [(node, output, Term(node, None, None, (), True))]
    while pending and len(found) < MAX_TERMS:
        node, output, around = pending.pop()
        node, output, term = _strip(node, output, around, scales)
        parts = list(_parts(node)) if term.scaler is None and term.known else []
        if len(parts) + len(pending) > MAX_TERMS:
            parts = []
        if parts:
            pending += [(child, number, term) for child, number in reversed(parts)]
            continue
        if term.scaler is None and scales and search:
            term = term._replace(scaler=_search(node, scales))
        found.append(term._replace(node=node, dtype=term.dtype or _dtype(node, output)))
    return found


def _strip(node: Any, output: int, term: Term, scales: Mapping[int, str]) -> tuple[Any, int, Term]:
    """Go below multiplications and conversions, and add to the term what it is multiplied with."""
    for _ in range(MAX_DEPTH):
        if term.dtype is None and (dtype := _dtype(node, output)) in _LOW:
            term = term._replace(dtype=dtype)
        name = node.name()
        inputs = [(child, number) for child, number in node.next_functions if child is not None]
        if name.startswith(_COMPILED):
            return node, output, term._replace(known=term.scaler is not None)
        if name not in SCALINGS or len(inputs) != 1:
            break
        if name != _COPY:
            factor = _factor(node, name)
            if factor is None:
                term = term._replace(known=False)
            elif term.scaler is None and factor.numel() and factor.data_ptr() in scales:
                term = term._replace(scaler=scales[factor.data_ptr()])
            elif factor.dim() == 0 and not factor.is_complex():
                value = float(factor) if factor.device.type == "cpu" else factor
                if name == _DIV:  # a batch without anything that counts divides by 0
                    value = math.inf if isinstance(value, float) and not value else 1.0 / value
                term = term._replace(factors=(*term.factors, value))
        elif _dim(inputs[0][0], inputs[0][1]) != 0:
            break  # the conversion of what the loss is computed from
        node, output = inputs[0]
    return node, output, term


def _factor(node: Any, name: str) -> Tensor | None:
    """Return the tensor that a multiplication multiplies its graph's input with; None if it cannot be read."""
    first = name == _DIV or node.next_functions[0][0] is not None
    own = "other" if first else "self"
    raw = getattr(node, f"_raw_saved_{own}", None)
    # a hook on a saved tensor is the person's: calling it may load the tensor from disk, or run a forward pass again
    hook = getattr(raw, "unpack_hook", None if _dim(node, 0) < 2 else raw)  # older torch does not tell of hooks
    if raw is None or hook is not None:
        return None
    # Where a loss is divided by a number, a dispatch mode around the loop (a FLOP counter) is handed that number, and
    # not the saved tensor; a view of it is a tensor like any other.
    with torch._C._DisableTorchDispatch():
        try:
            saved = getattr(node, f"_saved_{own}")
        except RuntimeError:  # freed by an earlier backward pass
            return None
        return saved.detach().view(saved.shape) if isinstance(saved, Tensor) else None


def _parts(node: Any) -> Iterator[tuple[Any, int]]:
    """Yield the terms of a sum, or of a reduction of stacked losses."""
    if node.name() in _REDUCTIONS:
        child = node.next_functions[0][0]
        if child is None or child.name() not in _STACKS:
            return
        node = child
    elif node.name() not in _SUMS:
        return
    for child, number in node.next_functions:
        if child is not None:
            yield child, number


def _search(root: Any, scales: Mapping[int, str]) -> str | None:
    """Look for a scale as a factor further down: of a vector of losses, or of the outputs."""
    queue, met = deque([root]), {root}
    while queue:
        node = queue.popleft()
        if node.name() == _MUL and sum(child is not None for child, _ in node.next_functions) == 1:
            factor = _factor(node, _MUL)
            if factor is not None and factor.dim() == 0 and factor.data_ptr() in scales:
                return scales[factor.data_ptr()]
        for child, _ in node.next_functions:
            if child is not None and child not in met and len(met) < MAX_SEARCHED:
                met.add(child)
                queue.append(child)
    return None


def _metadata(node: Any, output: int, read: Callable[[Any], Any]) -> Any:
    try:
        return read(node._input_metadata[output])
    except (AttributeError, IndexError, RuntimeError):
        return None


def _dtype(node: Any, output: int) -> torch.dtype | None:
    dtype = _metadata(node, output, lambda metadata: metadata.dtype)
    return dtype if isinstance(dtype, torch.dtype) else None


def _dim(node: Any, output: int) -> int:
    shape = _metadata(node, output, lambda metadata: metadata.shape)
    return len(shape) if shape is not None else 0
