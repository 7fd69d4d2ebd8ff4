"""What a Trainer trains, as a setup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from tl_core import TrainingSetup

_LIBRARIES = ("transformers", "accelerate")


def setup_of(trainer: Trainer) -> TrainingSetup:
    """Return the setup of a Trainer whose training has begun; ``state`` holds the person's own callbacks."""
    setup = empty_setup(trainer)
    fill(setup, trainer, state=own_callbacks(trainer))
    return setup


def empty_setup(trainer: Trainer) -> TrainingSetup:
    """Return a setup that holds nothing but the model yet."""
    model: Any = trainer.model
    return TrainingSetup(model, {})


def fill(setup: TrainingSetup, trainer: Trainer, *, state: Mapping[str, Any]) -> None:
    """Put what a Trainer trains into a setup, in place of what was there.

    The optimizer is the one inside of accelerate's wrapper.
    """
    setup.model = empty_setup(trainer).model
    for members, found in (
        (setup.optimizers, {"optimizer": unwrapped(trainer.optimizer)}),
        (setup.schedulers, {} if trainer.lr_scheduler is None else {"scheduler": trainer.lr_scheduler}),
        (setup.state, state),
    ):
        members.clear()
        members.update(found)
    setup.scaler = trainer.accelerator.scaler


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of accelerate's wrappers."""
    while type(optimizer).__module__.partition(".")[0] == "accelerate":
        optimizer = optimizer.optimizer
    return optimizer


def own_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks that are no library's, by the names of their classes."""
    own = [c for c in trainer.callback_handler.callbacks if type(c).__module__.partition(".")[0] not in _LIBRARIES]
    names = [type(callback).__name__ for callback in own]
    # several of one class are told apart by their order
    numbered = [
        name if names.count(name) == 1 else f"{name}[{names[:place].count(name)}]" for place, name in enumerate(names)
    ]
    return dict(zip(numbered, own, strict=True))
