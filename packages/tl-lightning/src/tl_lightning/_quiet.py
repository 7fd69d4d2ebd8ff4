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
    loggers = map(logging.getLogger, _NAMES)
    # only what is changed here: a fit in steps may end long after its own quiet() began, when others have ended
    louder = [(logger, logger.level) for logger in loggers if logger.level < logging.WARNING]
    for logger, _ in louder:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in louder:
            logger.setLevel(level)
