"""Which loaders accelerate takes for being iterated: it notes them in one place for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import Trainer


@contextmanager
def iterated_loaders_put_back(trainer: Trainer) -> Iterator[None]:
    """Let loaders be left in the middle of an epoch: afterwards none of them counts as being iterated."""
    state = trainer.accelerator.gradient_state
    iterated = state.dataloader_references
    try:
        yield
    finally:
        state.dataloader_references = iterated
