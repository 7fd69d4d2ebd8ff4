"""What a Trainer trains with, as a ``TrainingSetup``."""

from __future__ import annotations

from typing import Any

from tl_core import TrainingSetup
from tl_telemetry import is_own_class


def setup_of(trainer: Any) -> TrainingSetup:
    """Make a setup of what a Trainer has built: module, optimizers, schedulers, scaler, the person's callbacks."""
    setup = TrainingSetup(trainer.lightning_module, {})
    fill(setup, trainer)
    return setup


def fill(setup: TrainingSetup, trainer: Any) -> None:
    """Put what a Trainer has built into a setup, in place of what it held."""
    made = TrainingSetup(
        trainer.lightning_module,
        _one_or_several(list(trainer.optimizers)),
        _schedulers(trainer.lr_scheduler_configs),
        getattr(trainer.precision_plugin, "scaler", None),
    )
    setup.model = made.model
    setup.scaler = made.scaler
    # with manual optimization, the module steps its schedulers
    setup.driver = "Lightning" if trainer.lightning_module.automatic_optimization else ""
    for held, now in ((setup.optimizers, made.optimizers), (setup.schedulers, made.schedulers)):
        held.clear()
        held.update(now)
    for name, callback in own_callbacks(trainer).items():
        setattr(setup, name, callback)


def own_callbacks(trainer: Any) -> dict[str, Any]:
    """Return the callbacks that are of the person's own classes, by the names of these."""
    own = [callback for callback in trainer.callbacks if is_own_class(type(callback))]
    names = [type(callback).__name__ for callback in own]
    # several of one class are numbered
    numbers = [f"[{names[:place].count(name)}]" if names.count(name) > 1 else "" for place, name in enumerate(names)]
    return {f"{name}{number}": callback for name, number, callback in zip(names, numbers, own, strict=True)}


def _one_or_several(optimizers: list[Any]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else optimizers or {}


def _schedulers(configs: list[Any]) -> Any:
    """Name the schedulers as ``configure_optimizers`` does, else as a setup names them."""
    if len(configs) == 1 and not configs[0].name:
        return configs[0].scheduler
    named: dict[str, Any] = {}
    for index, config in enumerate(configs):
        name = config.name or f"scheduler[{index}]"
        named[f"{name} [{index}]" if name in named else name] = config.scheduler
    return named
