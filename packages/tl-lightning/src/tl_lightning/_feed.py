"""What a Trainer takes for its loader: batches are handed in one by one, from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Where a person names no epoch's length: so long that none ends within a check.
ENDLESS = 1_000_000


class Feed:
    """Ask for a batch whenever the Trainer wants one.

    Args:
        length: batches in an epoch.

    Attributes:
        pause: stops the Trainer's loop, and returns the next batch.
        place: how many batches of the epoch were handed in. May be set while the Trainer waits for one: when a
            checkpoint is loaded.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.place = 0
        self.pause: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        assert self.pause is not None
        self.place = 0
        while self.place < self.length:
            batch = self.pause()
            self.place += 1
            yield batch
