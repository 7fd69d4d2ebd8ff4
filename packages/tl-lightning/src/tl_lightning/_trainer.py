"""Trainers set up for tests and checks."""

from __future__ import annotations

from typing import Any

import torch

from tl_lightning._flavor import any_flavor, flavor_of
from tl_lightning._quiet import quiet

MAX_STEPS = 8

_QUIET = {
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}


def make_lightning_trainer(*, device: str | torch.device = "cpu", **trainer_kwargs: Any) -> Any:
    """Make a Trainer set up for tests: on one device, quiet, for few steps, and without writing files.

    It is a ``Trainer`` of the package that is imported already, ``lightning.pytorch`` or ``pytorch_lightning``; where
    neither is, of the one that is installed.

    Args:
        device: where it trains.
        trainer_kwargs: arguments of ``Trainer``, which win over those of this function. Without ``max_steps``,
            ``max_epochs``, ``max_time`` or ``fast_dev_run``, training ends after 8 updates.

    Returns:
        The Trainer. Calling it makes another one, with other arguments in addition: ``trainer(max_steps=3)``.

    Example:
        >>> trainer = make_lightning_trainer(max_steps=3)
        >>> trainer.fit(module, loader)

    Raises:
        ImportError: neither package is installed.
    """
    flavor = any_flavor()
    limits = ("max_steps", "max_epochs", "max_time", "fast_dev_run")
    few = {} if any(trainer_kwargs.get(name) for name in limits) else {"max_steps": MAX_STEPS}

    class TestTrainer(flavor.Trainer):  # type: ignore[misc,name-defined]
        def __call__(self, **others: Any) -> Any:
            return make_lightning_trainer(**{"device": device, **trainer_kwargs, **others})

        def fit(self, *given: Any, **named: Any) -> None:
            module = given[0] if given else named.get("model")
            if flavor_of(module, "the module", "LightningModule") is not flavor:
                raise TypeError(
                    f"the module is not one of {flavor.__name__}, as the Trainer is: lightning and pytorch_lightning "
                    "have no class in common, so import only one of them"
                )
            with quiet():
                super().fit(*given, **named)

    with quiet():
        return TestTrainer(**{**trainer_arguments(device), **few, **trainer_kwargs})


def trainer_arguments(device: str | torch.device) -> dict[str, Any]:
    """Return the arguments of a quiet Trainer on a device."""
    wanted = torch.device(device)
    devices: Any = 1 if wanted.index is None or wanted.type == "cpu" else [wanted.index]
    return {**_QUIET, "accelerator": wanted.type, "devices": devices}
