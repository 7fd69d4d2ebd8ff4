"""The rule on Parameters that are different objects but share memory."""

from __future__ import annotations

import torch

from tl_core import Finding
from tl_coverage._inventory import Inventory, as_code
from tl_coverage._spans import Span, overlap, span_of


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
                if first.end > second.first and overlap(first, second):
                    findings.append(_finding(inventory, first, second))
                    if any(span.name not in inventory.missing for span in (first, second)):
                        unreached |= {first.name, second.name} & inventory.missing.keys()
    return findings, unreached


def _clusters(inventory: Inventory) -> list[list[Span]]:
    """Group the parameters by device into chains of overlapping address ranges; lone ones are left out."""
    by_device: dict[torch.device, list[Span]] = {}
    for name, parameter in inventory.trainable.items():
        span = span_of(name, parameter)
        if span is not None:
            by_device.setdefault(parameter.device, []).append(span)
    clusters: list[list[Span]] = []
    for spans in by_device.values():
        end = -1
        for span in sorted(spans, key=lambda span: span.first):
            if span.first < end:
                clusters[-1].append(span)
            else:
                clusters.append([span])
            end = max(end, span.end)
    return [cluster for cluster in clusters if len(cluster) > 1]


def _finding(inventory: Inventory, first: Span, second: Span) -> Finding:
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
