"""The batches of one training, given to other trainings in place of their own."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from transformers import Trainer

from tl_core import preserve_rng


class RepeatedBatches:
    """Gives the trainings of a check the batches that the first of them drew.

    Drawing touches no generator of the process in any of them.

    Attributes:
        drew_from: the generators that drawing batches had moved, where no epoch began.
    """

    def __init__(self) -> None:
        self.drew_from: set[str] = set()
        self._first: Trainer | None = None
        self._drawn: dict[int, tuple[list[Any], Any]] = {}

    def feed(self, trainer: Trainer) -> None:
        """Put a Trainer's batches under control, for good."""
        if self._first is None:
            self._first = trainer
        original = trainer.get_batch_samples
        begun: list[Iterator[Any]] = []

        def get_batch_samples(epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
            update = trainer.state.global_step
            if trainer is self._first and update not in self._drawn:
                with preserve_rng():
                    before = _generators()
                    self._drawn[update] = original(epoch_iterator, *args, **kwargs)
                    if any(one is epoch_iterator for one in begun):
                        self.drew_from |= {name for name, state in _generators().items() if state != before[name]}
                begun[:] = [epoch_iterator]
            samples, num_items = self._drawn[update]
            return copy.deepcopy(samples), num_items

        vars(trainer)["get_batch_samples"] = get_batch_samples


def _generators() -> dict[str, Any]:
    state: Any = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (state[1].tolist(), state[2:]),
        "torch": torch.get_rng_state().tolist(),
    }
