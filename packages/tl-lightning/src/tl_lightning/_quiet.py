"""Keeps a Trainer's own announcements (devices, tips, restored checkpoints) out of a check's output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The levels that loggers had before the first of the blocks that are open; blocks end in any order.
_levels: dict[str, int] = {}
_open: dict[str, int] = {}


@contextmanager
def quiet(flavor: Any) -> Iterator[None]:
    """Let only warnings and errors of the package's loggers through."""
    names = (flavor.__name__, "lightning.fabric", "lightning_fabric")
    for name in names:
        logger = logging.getLogger(name)
        if not _open.get(name):
            _levels[name] = logger.level
            logger.setLevel(max(logger.level, logging.WARNING))
        _open[name] = _open.get(name, 0) + 1
    try:
        yield
    finally:
        for name in names:
            _open[name] -= 1
            if not _open[name]:
                logging.getLogger(name).setLevel(_levels.pop(name))
