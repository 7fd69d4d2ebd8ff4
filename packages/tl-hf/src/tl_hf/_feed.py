"""What a Trainer takes for its loader: micro-batches that are handed in group by group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any


class Feed:
    """Gives the micro-batches of one group after the other.

    Args:
        length: micro-batches in an epoch.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: deque[Any] = deque()

    def give(self, batches: Sequence[Any], size: int) -> None:
        """Hand in the next group, which the Trainer draws as a whole before it trains on the first.

        Args:
            batches: its micro-batches.
            size: how many of them there have to be, at least; the last one is given again where there are fewer. An
                incomplete last group is drawn as it is: nobody asks for what is too much.
        """
        self._waiting.clear()
        self._waiting.extend(batches)
        self._waiting.extend([batches[-1]] * (size - len(batches)))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._length):
            yield self._waiting.popleft()
