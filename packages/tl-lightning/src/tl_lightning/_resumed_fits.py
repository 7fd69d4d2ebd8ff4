"""The fits that a resume check runs: from the beginning, and from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from tl_core import TrainingSetup, noted, preserve_rng, seed_everything
from tl_lightning._fit import Hooks, ended, loss_of, result_of, stepped_fit
from tl_lightning._flavor import flavor_of
from tl_lightning._quiet import quiet
from tl_lightning._setup import fill, own_callbacks, setup_of
from tl_telemetry import (
    StateCapture,
    StateDifference,
    SteppedLoop,
    capture_state,
    compare_captures,
    is_own_namespace,
)

FORMS = "(trainer, module), (trainer, module, train_dataloaders or datamodule) or (..., ..., ..., val_dataloaders)"


class Fits:
    """The fits of one check, each by the setup that it trains.

    Args:
        make_fit: builds Trainer, module and data.
        steps: how many batches an uninterrupted fit trains on.

    Attributes:
        callbacks: the names of the person's callbacks.
        restoring: the names of those that have a ``load_state_dict`` of their own.
        lost: what changed between the checkpoint and the next batch in the run that saved, and not when resumed.
        overwritten: what changed there in a resumed fit only.
        beyond_epoch: which batch of an epoch a resumed fit trained on that has not as many; 0: none.
    """

    def __init__(self, make_fit: Callable[[], tuple[Any, ...]], steps: int) -> None:
        if not callable(make_fit):
            raise TypeError(f"make_fit must be a function that returns {FORMS}, got a {type(make_fit).__name__}")
        self._make_fit = make_fit
        self._steps = steps
        self._saved_in_epoch = False  # whether a checkpoint was saved before the last batch of its epoch
        self._given: WeakSet[Any] = WeakSet()  # the Trainers and modules that make_fit returned
        self._held: tuple[Any, StateCapture] | None = None  # the Trainer that saved or was resumed, and its state then
        self._changed: list[str] = []  # in the run that saved, between the checkpoint and the next batch
        self.callbacks: set[str] = set()
        self.restoring: set[str] = set()
        self.lost: list[str] = []
        self.overwritten: list[str] = []
        self.beyond_epoch = 0
        self._running: WeakKeyDictionary[TrainingSetup, tuple[Any, SteppedLoop]] = WeakKeyDictionary()

    def device(self, seed: int) -> Any:
        """Return the device that the Trainers train on."""
        with preserve_rng():
            seed_everything(seed)
            trainer, _, _ = self._build()
            return trainer.strategy.root_device

    def make_setup(self) -> TrainingSetup:
        trainer, loop = self._begin(None)
        for name, callback in own_callbacks(trainer).items():
            self.callbacks.add(name)
            # the person's own, of whichever of their classes, and not Lightning's, which does nothing
            if is_own_namespace(getattr(type(callback).load_state_dict, "__globals__", {})):
                self.restoring.add(name)
        setup = setup_of(trainer)
        self._running[setup] = (trainer, loop)
        return setup

    def step(self, setup: TrainingSetup, index: int) -> Any:
        trainer, loop = self._running[setup]
        loss = None if loop.over else _advance(loop)
        if loop.over:
            raise ValueError(f"{ended(trainer, index)}; and steps={self._steps} needs {self._steps}")
        return result_of(loss, trainer)

    def save(self, setup: TrainingSetup, path: Path) -> None:
        trainer, _ = self._running[setup]
        self._saved_in_epoch = not trainer.is_last_batch
        with quiet():
            trainer.save_checkpoint(path)
        self._held = trainer, capture_state(setup)

    def load(self, setup: TrainingSetup, path: Path) -> None:
        self._running.pop(setup)[1].close()
        trainer, loop = self._begin(path)
        fill(setup, trainer)
        self._running[setup] = (trainer, loop)
        self._held = trainer, capture_state(setup)

    def close(self) -> None:
        for _, loop in list(self._running.values()):
            loop.close()

    def _begin(self, checkpoint: Path | None) -> tuple[Any, SteppedLoop]:
        """Begin a fit, and stop it before its first batch, with everything restored."""
        trainer, module, arguments = self._build()
        for what, one in (("Trainer", trainer), ("module", module)):
            if one in self._given:
                raise ValueError(f"make_fit() returned the same {what} as an earlier call: build it inside make_fit()")
            self._given.add(one)
        if checkpoint is not None:
            arguments["ckpt_path"] = checkpoint
        # where the run that saved stood: within an epoch, its loader's iterator was there and had drawn its seed
        within = checkpoint is not None and self._saved_in_epoch
        loop = stepped_fit(
            trainer,
            module,
            lambda pause: _hooks(pause, trainer, within, partial(self._batch_begins, checkpoint)),
            **arguments,
        )
        with noted("raised in Trainer.fit, before the first batch"):
            _advance(loop)
        if loop.over:
            raise ValueError("Trainer.fit ended before the first batch: look at the Trainer's limits and the loader")
        return trainer, loop

    def _build(self) -> tuple[Any, Any, dict[str, Any]]:
        with quiet():  # a Trainer announces its devices when it is built
            return _arguments(self._make_fit())

    def _batch_begins(self, checkpoint: Path | None, trainer: Any, batch_idx: int) -> None:
        """Look, at the first batch after a checkpoint, what has changed since it was written or restored."""
        if checkpoint is not None and batch_idx >= trainer.num_training_batches:
            self.beyond_epoch = batch_idx + 1
        if self._held is None or self._held[0] is not trainer:
            return
        setup = next(setup for setup, (one, _) in self._running.items() if one is trainer)
        held, self._held = self._held[1], None
        changed = [name for d in compare_captures(held, capture_state(setup)) if (name := _named(d, setup)) is not None]
        changed = list(dict.fromkeys(changed))
        if checkpoint is None:
            self._changed = changed
        else:
            self.lost = [name for name in self._changed if name not in changed]
            self.overwritten = [name for name in changed if name not in self._changed]


def _advance(loop: SteppedLoop) -> Any:
    """Run to the next pause, without the warning that a loader has no position: the check tells what that does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        return loop.advance()


def _named(difference: StateDifference, setup: TrainingSetup) -> str | None:
    """Name what changed; None for what moves with every batch that is drawn."""
    piece, path = difference.piece, ".".join(map(str, difference.path))
    if piece.kind == "scheduler":
        return f"scheduler {piece.name!r} ({type(setup.schedulers[piece.name]).__name__})"
    if piece.kind == "attribute":
        return f"callback {piece.name}.{path}"
    if piece.kind == "module attributes":
        return f"module.{path.removeprefix('.')}"
    if piece.kind in ("weights", "trainable"):
        return f"{'requires_grad of ' if piece.kind == 'trainable' else ''}{path}"
    if piece.kind in ("param groups", "optimizer state"):
        return f"the {'state' if piece.kind == 'optimizer state' else 'settings'} of {piece.name!r}"
    return None


def _hooks(pause: Callable[..., Any], trainer: Any, within: bool, look: Callable[[Any, int], None]) -> Hooks:
    """Pause before the first batch (``within`` an epoch, with the loader's iterator made), and after each batch."""
    losses: list[Any] = []

    def batch_begins(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        losses.clear()
        look(trainer, batch_idx)

    def batch_ended(trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        losses.append(loss_of(outputs, trainer))
        if not trainer.is_last_batch:
            pause(losses[0])

    def epoch_ended(trainer: Any, module: Any) -> None:
        if trainer.is_last_batch and losses:
            pause(losses[0])

    hooks: Hooks = {
        "on_train_batch_start": batch_begins,
        "on_train_batch_end": batch_ended,
        "on_train_epoch_end": epoch_ended,
    }
    if within:
        return {**hooks, "on_train_start": lambda *given: pause()}
    loop = trainer.fit_loop
    set_up = loop.setup_data

    def setup_data() -> None:
        del loop.setup_data  # this once: no hook comes between the restored state and the loader's iterator
        pause()
        set_up()

    loop.setup_data = setup_data
    return hooks


def _arguments(made: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Read what ``make_fit`` returned: the Trainer, the module, and the further arguments of ``fit``."""
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        got = f"{len(made)} elements" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise TypeError(f"make_fit() must return {FORMS}, got {got}")
    trainer, module = made[:2]
    flavor = flavor_of(trainer, "the first that make_fit() returns", "Trainer")
    if flavor is not flavor_of(module, "the second that make_fit() returns", "LightningModule"):
        raise TypeError("make_fit() returned a Trainer and a module of two packages: lightning and pytorch_lightning")
    names = (
        "datamodule" if len(made) > 2 and isinstance(made[2], flavor.LightningDataModule) else "train_dataloaders",
    )
    return trainer, module, dict(zip((*names, "val_dataloaders"), made[2:], strict=False))
