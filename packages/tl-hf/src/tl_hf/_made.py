"""Calls the person's ``make_trainer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from tl_core import noted


def made_by(make_trainer: Callable[..., Trainer], *arguments: Any) -> Trainer:
    """Return what ``make_trainer(*arguments)`` returns.

    Raises:
        TypeError: it is no Trainer.
    """
    shown = ", ".join(map(str, arguments))
    with noted(f"raised in make_trainer({shown})"):
        trainer = make_trainer(*arguments)
    if not isinstance(trainer, Trainer):
        raise TypeError(f"make_trainer({shown}) must return a transformers.Trainer, got a {type(trainer).__name__}")
    return trainer
