"""Progress bars of transformers, switched off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch the progress bars off with which transformers writes a model: a check writes many."""
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
