"""The person's own code that a training runs."""

from __future__ import annotations

import functools
import types
from typing import Any

from transformers import Trainer

_CODE = (type, types.FunctionType, types.MethodType, functools.partial)


def own_code(trainer: Trainer) -> functools.partial[None]:
    """Return the functions and classes that a Trainer runs, in a form that is followed through to what they use.

    What the person's code among them keeps in globals, classes and closures is then set back before each run, and
    captured.
    """
    parts = (
        trainer,
        *trainer.callback_handler.callbacks,
        trainer.model,
        trainer.train_dataset,
        trainer.data_collator,
        trainer.compute_loss_func,
        trainer.model_init,
    )
    return functools.partial(_nothing, *(part if isinstance(part, _CODE) else type(part) for part in parts))


def _nothing(*parts: Any) -> None:
    """Do nothing."""
