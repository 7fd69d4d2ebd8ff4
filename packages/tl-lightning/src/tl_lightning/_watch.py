"""Watches a real ``Trainer.fit``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tl_lightning._fit import Hooks, callback_of, loss_of
from tl_lightning._flavor import flavor_of
from tl_lightning._setup import fill, setup_of
from tl_telemetry import LateRun, TrainingRun, observe_later


@contextmanager
def watch_lightning(trainer: Any, *, track_updates: bool = True, allow: Iterable[str] = ()) -> Iterator[TrainingRun]:
    """Watch what a Trainer trains, with one record a batch.

    Args:
        trainer: a Trainer of ``lightning`` or of ``pytorch_lightning``.
        track_updates: measure how far each batch moves the parameters; costs one copy of the parameters.
        allow: ids of rules that are allowed to be broken in this run.

    Yields:
        The run, with all its assertions. Before training has begun, any look at it is a ``RuntimeError``.

    Raises:
        TypeError: ``trainer`` is no Trainer, or ``allow`` is a plain string.
        ValueError: ``allow`` names a rule that does not exist.

    Example:
        >>> with watch_lightning(trainer) as run:
        ...     trainer.fit(module, loader)
        >>> run.assert_healthy()
    """
    flavor = flavor_of(trainer, "trainer", "Trainer")
    with observe_later(track_updates=track_updates, allow=allow) as run, ExitStack() as step:
        callback = callback_of(flavor.Callback, _hooks(run, step))
        trainer.callbacks.append(callback)
        try:
            yield run
        finally:
            trainer.callbacks[:] = [one for one in trainer.callbacks if one is not callback]


def _hooks(run: LateRun, step: ExitStack) -> Hooks:
    """Make one record from a batch's start to the next one's: schedulers may step after its end.

    A second ``fit`` of the same module, in another phase of a training, goes on with the same run.
    """
    current: list[Any] = []

    def begin(trainer: Any, module: Any) -> None:
        if run.begun and run.setup.model is module:
            fill(run.setup, trainer)
        else:
            run.begin(setup_of(trainer))

    def batch_begins(trainer: Any, module: Any, batch: Any, *rest: Any) -> None:
        step.close()
        current[:] = [step.enter_context(run.step(batch))]

    def batch_ended(trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = loss_of(outputs, trainer)
        if loss is not None:
            current[0].loss = loss

    return {
        "on_train_start": begin,
        "on_train_batch_start": batch_begins,
        "on_train_batch_end": batch_ended,
        "on_train_end": lambda *given: step.close(),
        "on_exception": lambda *given: step.close(),
    }
