"""Hears what a Trainer does: the beginning, each micro-batch and its loss, each update, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import Trainer


class Listener:
    """What can be heard of a training. Each method is called in the training's own thread, after the callbacks."""

    def begins(self) -> None:
        """Hear that model, optimizer and scheduler are there, and a checkpoint is loaded."""

    def micro_batch_begins(self, inputs: Any) -> None:
        """Hear that a micro-batch is about to be trained on; ``inputs`` is only looked at."""

    def loss(self, loss: Tensor) -> None:
        """Hear what ``training_step`` returned: the loss as ``backward`` was called on it."""

    def micro_batch_ended(self) -> None:
        """Hear that a micro-batch is done, with the update if it was the last one of its group."""

    def update_ended(self, save: Callable[[], None]) -> None:
        """Hear that an update is done, with the logs, the evaluation and the checkpoint that were due after it.

        Args:
            save: makes the Trainer write a checkpoint of this moment, as it writes any.
        """

    def ended(self) -> None:
        """Hear that the training is over."""


# Of each Trainer, who listens, and the taps: one set of them serves all listeners, so that they can leave in any order.
_heard: WeakKeyDictionary[Trainer, tuple[list[Listener], ExitStack]] = WeakKeyDictionary()


@contextmanager
def listening(trainer: Trainer, listener: Listener) -> Iterator[None]:
    """Let a listener hear what a Trainer does; with the last one everything is put back."""
    if trainer not in _heard:
        # a new list: a tap of earlier, which somebody else's wrapper still calls, has the old one
        listeners: list[Listener] = []
        _heard[trainer] = listeners, _tapped(trainer, listeners)
    listeners, taps = _heard[trainer]
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
        if not listeners:
            del _heard[trainer]
            taps.close()


def _tapped(trainer: Trainer, listeners: list[Listener]) -> ExitStack:
    """Put taps into a Trainer. Callbacks would not do: a resumed Trainer puts restored ones after all others."""
    update_done = False

    def training_step(original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in list(listeners):
            listener.micro_batch_begins(inputs)
        loss = original(model, inputs, *args, **kwargs)
        for listener in list(listeners):
            listener.loss(loss)
        return loss

    def after(told: Callable[[Listener], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for listener in list(listeners):
            told(listener)
        return result

    def on_step_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal update_done
        update_done = True
        return after(told("micro_batch_ended"), original, *args, **kwargs)

    def log_save_evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal update_done
        original(*args, **kwargs)
        if not update_done:
            return  # the end of an epoch
        update_done = False

        def save() -> None:
            trainer.control.should_save = True
            original(*args, **kwargs)  # what was due is done: it only saves

        for listener in list(listeners):
            listener.update_ended(save)

    def told(name: str) -> Callable[[Listener], None]:
        return lambda listener: getattr(listener, name)()

    handler = trainer.callback_handler
    with ExitStack() as taps:  # one that cannot be put in takes the others away
        for owner, name, tap in (
            (handler, "on_train_begin", functools.partial(after, told("begins"))),
            (trainer, "training_step", training_step),
            (handler, "on_substep_end", functools.partial(after, told("micro_batch_ended"))),
            (handler, "on_step_end", on_step_end),
            (trainer, "_maybe_log_save_evaluate", log_save_evaluate),
            (handler, "on_train_end", functools.partial(after, told("ended"))),
        ):
            taps.callback(_tap(owner, name, tap))
        return taps.pop_all()


def _tap(owner: Any, name: str, tap: Callable[..., Any]) -> Callable[[], None]:
    """Put an attribute before a method; returns what takes it away."""
    original = getattr(owner, name)
    own = vars(owner).get(name)
    tapped = functools.wraps(original)(functools.partial(tap, original))
    setattr(owner, name, tapped)

    def untap() -> None:
        if vars(owner).get(name) is not tapped:
            return  # somebody else has put something there since, which calls this one
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return untap
