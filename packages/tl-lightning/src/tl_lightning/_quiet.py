"""Keeps a Trainer's own announcements (devices, tips, restored checkpoints) out of a check's output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet(flavor: Any) -> Iterator[None]:
    """Let only warnings and errors of the package's loggers through."""
    held = [logging.getLogger(name) for name in (flavor.__name__, "lightning.fabric", "lightning_fabric")]
    levels = [logger.level for logger in held]
    for logger in held:
        logger.setLevel(max(logger.level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in zip(held, levels, strict=True):
            logger.setLevel(level)
