"""What a Trainer takes for its loader: micro-batches that are handed in group by group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class Feed:
    """Gives the micro-batches that wait in a queue.

    Args:
        length: micro-batches in an epoch.

    Attributes:
        waiting: what comes next; filled before the Trainer asks for it.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.waiting: deque[Any] = deque()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield self.waiting.popleft()
