"""Sees when averages of the weights in ``setup.state`` are written to, from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_telemetry._fingerprints import is_average

# How deep in an object of somebody's own its tensors are looked for: `ema.shadow["weight"]`.
MAX_DEPTH = 3


class Averages:
    """The averages of a setup, as last seen: which tensors they hold, and how often each was written to."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._seen: dict[str, tuple[tuple[int, int], ...]] = {}

    def look(self) -> tuple[str, ...]:
        """Return the names of those that were written to, or that got other tensors, since the last look."""
        moved = []
        for name, value in self._setup.state.items():
            if not is_average(name, value):
                continue
            now = tuple((id(tensor), tensor._version) for tensor in self._tensors(value) if not tensor.is_inference())
            if self._seen.get(name, now) != now:
                moved.append(name)
            self._seen[name] = now
        return tuple(moved)

    def _tensors(self, value: Any, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            if value is not self._setup.model:  # an average that keeps the model it is of
                yield from value.parameters()
                yield from value.buffers()
        elif depth:
            parts = value.values() if isinstance(value, Mapping) else value
            if not isinstance(value, (Mapping, list, tuple)):
                parts = getattr(value, "__dict__", {}).values()
            for part in parts:
                yield from self._tensors(part, depth - 1)
