"""Watches a real ``trainer.train()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import Trainer

from tl_hf._attributes import show
from tl_hf._fit import undivided
from tl_hf._listen import Listener, listening
from tl_hf._setup import fill, setup_of
from tl_telemetry import LateRun, TrainingRun, observe_later


class _Watch(Listener):
    """Makes one record a micro-batch."""

    def __init__(self, trainer: Trainer, run: LateRun) -> None:
        self._trainer = trainer
        self._run = run
        self._step = ExitStack()
        self._current: Any = None

    def begins(self) -> None:
        self.micro_batch_ended()
        if self._again():
            fill(self._run.setup, self._trainer)
            return
        setup = setup_of(self._trainer)
        show(self._trainer, setup)
        self._run.begin(setup)

    def _again(self) -> bool:
        """Tell whether this is one training that begins anew, as with ``auto_find_batch_size``."""
        run = self._run
        return run.begun and not run.facts.over and run.setup.model is self._trainer.model

    def micro_batch_begins(self, inputs: Any) -> None:
        self.micro_batch_ended()
        show(self._trainer, self._run.setup)
        self._current = self._step.enter_context(self._run.step(inputs))

    def loss(self, loss: Tensor) -> None:
        self._current.loss = undivided(loss, self._trainer)

    def micro_batch_ended(self) -> None:
        self._step.close()

    def ended(self) -> None:
        self.micro_batch_ended()
        self._run.end()


@contextmanager
def watch_hf(trainer: Trainer, *, track_updates: bool = True, allow: Iterable[str] = ()) -> Iterator[TrainingRun]:
    """Watch what a Trainer does in ``train()``: a ``TrainingRun`` with one record a micro-batch.

    Nothing is changed: the training is bitwise the unwatched one, and everything is put back on leaving. A record's
    loss is that of its micro-batch as far as it counts in the update: the mean over a group is the update's loss.

    Example:
        >>> with watch_hf(trainer) as run:
        ...     trainer.train()
        >>> run.assert_healthy()

    Args:
        trainer: the Trainer; ``train()`` is called inside, once.
        track_updates: measure how far each update moves the parameters; costs one copy of the parameters.
        allow: ids of rules that are allowed to be broken.

    Yields:
        The run. Before the training has begun, any look at it is a ``RuntimeError``.

    Raises:
        TypeError, ValueError: an argument is not what is allowed.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got a {type(trainer).__name__}")
    with observe_later(track_updates=track_updates, allow=allow) as run:
        watch = _Watch(trainer, run)
        with listening(trainer, watch):
            try:
                yield run
            finally:
                watch.micro_batch_ended()
