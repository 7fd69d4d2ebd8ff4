"""Which parameters become trainable, or are frozen, during a run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

_requires_grad = attrgetter("requires_grad")


class Trainable:
    """Compares ``requires_grad`` of all followed parameters from step to step.

    Attributes:
        since: the step in which a parameter (by index) became trainable first.
        frozen_since: the step in which the loop froze a parameter that is frozen still.
    """

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        self.frozen_since: dict[int, int] = {}
        self._seen: list[bool] = []

    def look(self, tensors: Sequence[Tensor], step: int) -> None:
        """See what changed since the last look; parameters that are new count from now on."""
        now = list(map(_requires_grad, tensors))
        if now == self._seen:
            return
        for index, (was, is_now) in enumerate(zip(self._seen, now, strict=False)):
            if is_now and not was:
                self.since.setdefault(index, step)
                self.frozen_since.pop(index, None)
            elif was and not is_now:
                self.frozen_since[index] = step
        self._seen = now
