"""A real ``Trainer.fit``, from one pause to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_core import NoLoss
from tl_lightning._flavor import flavor_of
from tl_lightning._quiet import quiet
from tl_telemetry import SteppedLoop

Hooks = dict[str, Callable[..., Any]]


def callback_of(base: type, hooks: Hooks) -> Any:
    """Make a callback of functions: ``{"on_train_start": function(trainer, module), ...}``.

    Args:
        base: what its class is derived from, anew: the two packages have two ``Callback`` classes.
        hooks: the functions.
    """
    return type("Watch", (base,), {name: staticmethod(hook) for name, hook in hooks.items()})()


def stepped_fit(
    trainer: Any, module: Any, make_hooks: Callable[[Callable[..., Any]], Hooks], **arguments: Any
) -> SteppedLoop:
    """Return ``trainer.fit(module, **arguments)`` as a loop that stops where hooks call ``pause``.

    Args:
        trainer: the Trainer.
        module: the LightningModule.
        make_hooks: given ``pause``, returns the hooks of a callback that comes after the Trainer's others, as the
            callbacks that save checkpoints do.
        arguments: further arguments of ``fit``.
    """
    flavor = flavor_of(module, "module", "LightningModule")

    def fit(pause: Callable[..., Any]) -> None:
        def pause_or_leave(value: Any = None) -> Any:
            try:
                return pause(value)
            except BaseException:  # the loop is closed: no callback is to take that for an error of the training
                trainer.callbacks.clear()
                raise

        # Lightning calls those that save checkpoints last, after the module's own hook at the end of an epoch
        trainer.callbacks.append(callback_of(flavor.callbacks.Checkpoint, make_hooks(pause_or_leave)))
        # between two pauses, a signal is the caller's: Lightning's handler would only note a SIGTERM for its next step
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit(module, **arguments)

    return _QuietLoop(fit)


class _QuietLoop(SteppedLoop):
    """A loop whose Trainer announces nothing; between two pauses, the loggers are the caller's."""

    def advance(self, answer: Any = None) -> Any:
        with quiet():
            return super().advance(answer)

    def close(self) -> None:
        with quiet():
            super().close()


def result_of(loss: Any, trainer: Any) -> Any:
    """Return what a step returns: the loss; without one, what a module with manual optimization has logged."""
    if loss is not None:
        return loss
    logged = {} if trainer.lightning_module.automatic_optimization else dict(trainer.callback_metrics)
    return logged or NoLoss()


def ended(trainer: Any, batches: int) -> str:
    """Say why there is no further batch."""
    if trainer.should_stop:
        why = "a callback or the module stopped it (trainer.should_stop)"
    else:
        why = f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}"
    return f"Trainer.fit has ended after {batches} batch{'' if batches == 1 else 'es'}: {why}"


def loss_of(outputs: Any, trainer: Any) -> Any:
    """Return the loss that ``training_step`` returned, out of what ``on_train_batch_end`` is given; None without one.

    Automatic optimization has divided it by the number of batches that are accumulated.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None or not trainer.lightning_module.automatic_optimization:
        return loss
    return loss * trainer.accumulate_grad_batches
