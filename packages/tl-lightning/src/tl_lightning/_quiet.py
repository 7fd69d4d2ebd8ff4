"""Keeps a Trainer's own announcements (devices, tips, restored checkpoints) out of a check's output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Whichever of the two packages was imported last, both log by its logger.
_NAMES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


@contextmanager
def quiet() -> Iterator[None]:
    """Let only warnings and errors of Lightning's loggers through."""
    held = [logging.getLogger(name) for name in _NAMES]
    levels = [logger.level for logger in held]
    for logger in held:
        logger.setLevel(max(logger.level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in zip(held, levels, strict=True):
            logger.setLevel(level)
