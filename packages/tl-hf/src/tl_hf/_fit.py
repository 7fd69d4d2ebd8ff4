"""A real ``trainer.train()``, from one pause to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer

from tl_hf._folder import Folder
from tl_hf._listen import Listener, listening
from tl_hf._loaders import iterated_loaders_put_back
from tl_telemetry import SteppedLoop


class Fit:
    """One call of ``trainer.train()``, which stops at its beginning and after each update or micro-batch.

    Args:
        trainer: the Trainer.
        folder: where it writes.
        resume: what was in the folder when the checkpoint was written, and that one's name; or None.
        micro_batches: whether to stop after each micro-batch; else after each update, once all that was due is done.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Folder,
        *,
        resume: tuple[Path, str] | None = None,
        micro_batches: bool = False,
    ) -> None:
        self.trainer = trainer
        content, checkpoint = (None, None) if resume is None else (resume[0], str(folder.path / resume[1]))

        def train(pause: Callable[..., Any]) -> None:
            pauses = _MicroBatches(pause, trainer) if micro_batches else _Updates(pause)
            with iterated_loaders_put_back(trainer), folder.lent(trainer, content), listening(trainer, pauses):
                trainer.train(resume_from_checkpoint=checkpoint)

        self._loop = SteppedLoop(train)
        self._loop.advance()

    @property
    def over(self) -> bool:
        """Whether the training is over."""
        return self._loop.over

    def advance(self) -> Tensor | None:
        """Train on to the next stop; returns the loss, or None when the training ended instead."""
        loss: Tensor | None = self._loop.advance()
        return loss

    def save(self) -> str:
        """Make the Trainer write a checkpoint, where the fit stands; returns its name."""
        self._loop.advance(SAVE)
        return f"checkpoint-{self.trainer.state.global_step}"

    def close(self) -> None:
        """End the training where it stands."""
        self._loop.close()


SAVE = object()


class _Updates(Listener):
    """Stops after each update, and gives its loss."""

    def __init__(self, pause: Callable[..., Any]) -> None:
        self._pause = pause
        self._loss: Tensor | None = None

    def begins(self) -> None:
        self._pause()

    def loss(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def update_ended(self, save: Callable[[], None]) -> None:
        loss, self._loss = self._loss, None
        while self._pause(loss) is SAVE:
            save()


class _MicroBatches(Listener):
    """Stops after each micro-batch, and gives its loss, undivided."""

    def __init__(self, pause: Callable[..., Any], trainer: Trainer) -> None:
        self._pause = pause
        self._trainer = trainer
        self._loss: Tensor | None = None

    def begins(self) -> None:
        self._pause()

    def loss(self, loss: Tensor) -> None:
        self._loss = undivided(loss, self._trainer)

    def micro_batch_ended(self) -> None:
        self._pause(self._loss)


def undivided(loss: Tensor, trainer: Trainer) -> Tensor:
    """Return a micro-batch's loss so that the mean over its group is the loss of the update."""
    return loss * trainer.current_gradient_accumulation_steps
