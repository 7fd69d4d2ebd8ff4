"""The rule on Parameters that are different objects but share memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tl_core import Finding
from tl_coverage._inventory import Inventory, as_code, shape_of

MAX_MARKED = 2**28  # bytes of marks for the exact comparison of interleaved views


@dataclass(frozen=True, eq=False)
class _Span:
    """The bytes of memory that a parameter lies in."""

    name: str
    parameter: nn.Parameter
    first: int
    end: int


def shared_memory(inventory: Inventory) -> tuple[list[Finding], set[str]]:
    """Find trainable Parameters whose memory overlaps although they are different objects.

    Only addresses, sizes and strides are read, never values, so no device is waited for.

    Returns:
        The findings, and the names of parameters in no optimizer of which a finding speaks already.
    """
    findings: list[Finding] = []
    unreached: set[str] = set()
    for cluster in _clusters(inventory):
        for index, second in enumerate(cluster):
            for first in cluster[:index]:
                if first.end > second.first and _overlap(first, second):
                    findings.append(_finding(inventory, first, second))
                    if any(span.name not in inventory.missing for span in (first, second)):
                        unreached |= {first.name, second.name} & inventory.missing.keys()
    return findings, unreached


def _clusters(inventory: Inventory) -> list[list[_Span]]:
    """Group the parameters by device into chains of overlapping address ranges; lone ones are left out."""
    by_device: dict[torch.device, list[_Span]] = {}
    for name, parameter in inventory.trainable.items():
        span = _span(name, parameter)
        if span is not None:
            by_device.setdefault(parameter.device, []).append(span)
    clusters: list[list[_Span]] = []
    for spans in by_device.values():
        end = -1
        for span in sorted(spans, key=lambda span: span.first):
            if span.first < end:
                clusters[-1].append(span)
            else:
                clusters.append([span])
            end = max(end, span.end)
    return [cluster for cluster in clusters if len(cluster) > 1]


def _span(name: str, parameter: nn.Parameter) -> _Span | None:
    if shape_of(parameter) is None or parameter.layout is not torch.strided or parameter.numel() == 0:
        return None
    try:
        first: int = parameter.data_ptr()
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own: fake and wrapper subclasses
        return None
    if first == 0:  # the meta device
        return None
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return _Span(name, parameter, first, first + (last + 1) * parameter.element_size())


def _overlap(first: _Span, second: _Span) -> bool:
    if _is_dense(first.parameter) and _is_dense(second.parameter):
        return True
    # Views can lie between each other without sharing an element (the columns of one matrix): mark the bytes of one
    # and look at those of the other.
    start = min(first.first, second.first)
    size = max(first.end, second.end) - start
    if size > MAX_MARKED:
        return False
    marks = torch.zeros(size, dtype=torch.bool)
    _bytes(marks, first, start).fill_(True)
    return bool(_bytes(marks, second, start).any())


def _is_dense(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter fills its address range (in whatever order of its dimensions)."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return last + 1 == parameter.numel()


def _bytes(marks: torch.Tensor, span: _Span, start: int) -> torch.Tensor:
    width = span.parameter.element_size()
    strides = [stride * width for stride in span.parameter.stride()]
    return marks.as_strided([*span.parameter.shape, width], [*strides, 1], span.first - start)


def _finding(inventory: Inventory, first: _Span, second: _Span) -> Finding:
    names = [name for name in inventory.trainable if name in (first.name, second.name)]
    whole = (first.first, first.end) == (second.first, second.end)
    extent = "all of it" if whole else "a part of it"
    held = [name for name in names if name not in inventory.missing]
    if len(held) == 2:
        effect = (
            "both are in an optimizer, which updates this memory once for each, with a part of the gradient each time"
        )
    elif held:
        effect = f"only {held[0]} is in an optimizer, so the gradient of the other is lost"
    else:
        effect = "neither is in an optimizer"
    return Finding(
        "shared-memory",
        f"{names[0]} and {names[1]} are two Parameters that share memory ({extent}); {effect}",
        "sharing memory (through .data or a view) does not tie weights: each Parameter has a gradient of its own",
        f"tie them by assigning the Parameter itself, {as_code(names[1])} = {as_code(names[0])}, before the "
        "optimizer is built; if they are not meant to be tied, give each its own memory with .clone()",
        parameters=tuple(names),
        evidence={"whole": whole, "in_an_optimizer": tuple(held)},
    )
