"""A real ``Trainer.fit``, from one pause to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_lightning._flavor import flavor_of
from tl_lightning._quiet import quiet
from tl_telemetry import SteppedLoop

Hooks = dict[str, Callable[..., Any]]


def callback_of(flavor: Any, hooks: Hooks) -> Any:
    """Make a callback of functions: ``{"on_train_start": function(trainer, module), ...}``.

    The class is made anew, since the two packages have two ``Callback`` classes.
    """
    return type("Watch", (flavor.Callback,), {name: staticmethod(hook) for name, hook in hooks.items()})()


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
        trainer.callbacks.append(callback_of(flavor, make_hooks(pause)))
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


def loss_of(outputs: Any, trainer: Any) -> Any:
    """Return the loss that ``training_step`` returned, out of what ``on_train_batch_end`` is given; None without one.

    Automatic optimization has divided it by the number of batches that are accumulated.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None or not trainer.lightning_module.automatic_optimization:
        return loss
    return loss * trainer.accumulate_grad_batches
