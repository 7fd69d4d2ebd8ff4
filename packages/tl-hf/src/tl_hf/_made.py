"""Calls the person's ``make_trainer``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from transformers import Trainer

from tl_core import noted, preserve_rng, seed_everything


def check_make_trainer(make_trainer: Any, *parameters: str) -> None:
    """Raise the error of a ``make_trainer`` that cannot be called with these parameters.

    Raises:
        TypeError: it is no function, or takes others.
    """
    shown = f"make_trainer({', '.join(parameters)})"
    if isinstance(make_trainer, Trainer):
        raise TypeError(f"make_trainer must be a function that builds a fresh Trainer, got a Trainer: write {_LAMBDA}")
    if not callable(make_trainer):
        raise TypeError(f"make_trainer must be a function, {shown}, got a {type(make_trainer).__name__}")
    try:
        inspect.signature(make_trainer).bind(*parameters)
    except ValueError:  # a builtin without a signature
        return
    except TypeError:
        name = getattr(make_trainer, "__name__", type(make_trainer).__name__)
        raise TypeError(f"make_trainer is called as {shown}, got {name}{inspect.signature(make_trainer)}") from None


_LAMBDA = "make_trainer=lambda: Trainer(model=Model(), ...), with a new model in every call"


class Maker:
    """Makes the Trainers of one check.

    Args:
        make_trainer: the person's.
    """

    def __init__(self, make_trainer: Callable[..., Trainer]) -> None:
        self._make_trainer = make_trainer
        self._models: WeakSet[Any] = WeakSet()

    def first(self, *arguments: Any, seed: int) -> Trainer:
        """Return a Trainer to look at, made as the others are; the generators are put back."""
        with preserve_rng():
            seed_everything(seed)
            return self.make(*arguments)

    def make(self, *arguments: Any) -> Trainer:
        """Return what ``make_trainer(*arguments)`` returns.

        Raises:
            TypeError: it is no Trainer.
            ValueError: its model is that of an earlier one.
        """
        shown = f"make_trainer({', '.join(map(str, arguments))})"
        with noted(f"raised in {shown}"):
            trainer = self._make_trainer(*arguments)
        if not isinstance(trainer, Trainer):
            raise TypeError(f"{shown} must return a transformers.Trainer, got a {type(trainer).__name__}")
        if trainer.args.world_size > 1:
            raise ValueError(
                f"the check runs trainings of its own in one process, and {shown} returned a Trainer of "
                f"{trainer.args.world_size} processes: run it without torchrun or accelerate launch"
            )
        if trainer.model in self._models:
            raise ValueError(
                f"{shown} returned a Trainer with the model of an earlier call: every training needs a fresh one, so "
                "build model and Trainer inside of make_trainer"
            )
        self._models.add(trainer.model)
        return trainer
