"""A real ``Trainer.fit`` that is handed its batches one by one, and the setups made of such."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from tl_core import TrainingSetup, noted
from tl_lightning._feed import ENDLESS, Feed
from tl_lightning._fit import Hooks, ended, loss_of, result_of, stepped_fit
from tl_lightning._flavor import flavor_of, uncompiled
from tl_lightning._progress import TrainerState
from tl_lightning._quiet import quiet
from tl_lightning._setup import own_callbacks, setup_of
from tl_lightning._trainer import trainer_arguments


class FedFit:
    """One ``fit``, which stops whenever the Trainer wants a batch.

    Args:
        trainer: the Trainer.
        module: what it trains.
        flavor: the package that both come from.
        length: batches in an epoch; None: no epoch ends.
    """

    def __init__(self, trainer: Any, module: Any, flavor: Any, length: int | None) -> None:
        self.trainer = trainer
        self.feed = feed = Feed(ENDLESS if length is None else length)
        self._losses: list[Any] = []  # what training_step returned since the last batch
        losses = self._losses

        def hooks(pause: Callable[..., Any]) -> Hooks:
            feed.pause = pause
            return {"on_train_batch_end": lambda trainer, _, outputs, *rest: losses.append(loss_of(outputs, trainer))}

        arguments: dict[str, Any] = {"train_dataloaders": feed}
        own, base = type(uncompiled(module)), flavor.LightningModule
        if own.validation_step is not base.validation_step and own.val_dataloader is base.val_dataloader:
            # Lightning warns of a validation_step without any, and of one that is empty unless no batches are wanted
            arguments["val_dataloaders"] = []
            trainer.limit_val_batches = 0
        self._loop = stepped_fit(trainer, module, hooks, **arguments)
        with noted("raised in Trainer.fit, before the first batch"):
            self._loop.advance()
        if self._loop.over:
            raise ValueError("Trainer.fit ended before the first batch: look at trainer_kwargs and the module's hooks")

    def step(self, batch: Any) -> Any:
        """Train on one batch, until the Trainer wants the next one; return its loss."""
        trainer = self.trainer
        if self._loop.over:
            batches = trainer.fit_loop.total_batch_idx + 1
            raise RuntimeError(
                f"{ended(trainer, batches)}; and another batch came: change trainer_kwargs, or run fewer steps"
            )
        self._losses.clear()
        self._loop.advance(batch)
        return result_of(self._losses[-1] if self._losses else None, trainer)


class FedSetups:
    """Makes setups of a LightningModule, each with a Trainer whose ``fit`` has begun and waits for its first batch.

    Args:
        make_module: builds the module.
        epoch_length: batches in an epoch; None: no epoch ends.
        trainer_kwargs: arguments of ``Trainer``.

    Attributes:
        accumulate: how many batches the Trainers of the setups to come accumulate; None: as ``trainer_kwargs`` say.
        callbacks: the names of the person's callbacks in the setups.
    """

    def __init__(
        self, make_module: Callable[[], Any], epoch_length: int | None, trainer_kwargs: Mapping[str, Any] | None
    ) -> None:
        if not callable(make_module) or isinstance(make_module, torch.nn.Module):
            kind = type(make_module).__name__
            raise TypeError(f"make_module must be a function that builds the module anew, got a {kind}")
        if trainer_kwargs is not None and not isinstance(trainer_kwargs, Mapping):
            kind = type(trainer_kwargs).__name__
            raise TypeError(f"trainer_kwargs must be a dict of arguments of Trainer, got a {kind}")
        if epoch_length is not None and (isinstance(epoch_length, bool) or not isinstance(epoch_length, int)):
            raise TypeError(f"epoch_length must be an int, got {type(epoch_length).__name__} {epoch_length!r}")
        if epoch_length is not None and epoch_length < 1:
            raise ValueError(f"epoch_length must be at least 1, got {epoch_length}")
        self.make_module = make_module
        self.epoch_length = epoch_length
        self.accumulate: int | None = None
        self.callbacks: set[str] = set()
        self._given = dict(trainer_kwargs or {})
        self._modules: WeakSet[Any] = WeakSet()
        self._fits: WeakKeyDictionary[TrainingSetup, FedFit] = WeakKeyDictionary()  # each ends with its setup

    def make_setup(self, device: str | torch.device = "cpu") -> TrainingSetup:
        """Build a module and a Trainer, and begin its ``fit``."""
        module = self.make_module()
        flavor = flavor_of(module, "make_module()", "LightningModule")
        if module in self._modules:
            raise ValueError("make_module() returned the same module as an earlier call: build it anew in each call")
        self._modules.add(module)
        try:
            given = copy.deepcopy(self._given)
        except Exception as error:  # whatever the person's callback, logger or plugin refuses with
            raise TypeError(
                "trainer_kwargs is copied for each setup, which one of its values refuses; the module's own "
                f"configure_callbacks() can build callbacks anew instead: {error}"
            ) from error
        arguments = {**trainer_arguments(device), **given}
        if not {"max_epochs", "max_time"} & arguments.keys():
            arguments["max_epochs"] = -1
        if self.accumulate is not None and module.automatic_optimization:
            arguments["accumulate_grad_batches"] = self.accumulate
        with quiet():
            trainer = flavor.Trainer(**arguments)
        fit = FedFit(trainer, module, flavor, self.epoch_length)
        self.callbacks |= own_callbacks(trainer).keys()
        setup = setup_of(trainer)
        setup.state["trainer"] = TrainerState(trainer, fit.feed)
        self._fits[setup] = fit
        return setup

    def trainer_of(self, setup: TrainingSetup) -> Any:
        """Return the Trainer that trains a setup."""
        return self._fits[setup].trainer

    def step(self, setup: TrainingSetup, batch: Any) -> Any:
        """Hand a batch to the Trainer of a setup; return the loss."""
        return self._fits[setup].step(batch)
