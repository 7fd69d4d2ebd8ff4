"""What a Trainer trains, as a setup."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from tl_core import TrainingSetup
from tl_telemetry import is_own_class


def setup_of(trainer: Trainer) -> TrainingSetup:
    """Return the setup of a Trainer whose training has begun."""
    setup = empty_setup(trainer)
    fill(setup, trainer)
    return setup


def empty_setup(trainer: Trainer) -> TrainingSetup:
    """Return a setup that holds nothing but the model yet."""
    model: Any = trainer.model
    return TrainingSetup(model, {})


def fill(setup: TrainingSetup, trainer: Trainer) -> None:
    """Put what a Trainer trains into a setup, in place of what was there.

    The optimizer is the one inside of accelerate's wrapper. The person's own callbacks are attributes of the setup.
    """
    scheduler = trainer.lr_scheduler
    setup.model = empty_setup(trainer).model
    setup.optimizers.clear()
    setup.optimizers["optimizer"] = unwrapped(trainer.optimizer)
    setup.schedulers.clear()
    setup.schedulers.update({} if scheduler is None else {"scheduler": scheduler})
    setup.scaler = trainer.accelerator.scaler
    setup.driver = "transformers"
    for name, callback in own_callbacks(trainer).items():
        setattr(setup, name, callback)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of accelerate's wrappers."""
    while type(optimizer).__module__.partition(".")[0] == "accelerate":
        optimizer = optimizer.optimizer
    return optimizer


def own_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks that are of the person's own classes, by the names of these."""
    return named([callback for callback in trainer.callback_handler.callbacks if is_own_class(type(callback))])


def named(callbacks: list[Any]) -> dict[str, Any]:
    """Return callbacks by the names of their classes; several of one class are told apart by their order."""
    names = [type(callback).__name__ for callback in callbacks]
    numbered = [
        name if names.count(name) == 1 else f"{name}[{names[:place].count(name)}]" for place, name in enumerate(names)
    ]
    return dict(zip(numbered, callbacks, strict=True))
