"""A LightningModule as ``make_setup`` and ``step``, for every check that takes these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tl_core import TrainingSetup
from tl_lightning._fed import FedSetups
from tl_lightning._own_code import running


def from_lightning(
    make_module: Callable[[], Any], *, epoch_length: int | None = None, trainer_kwargs: Mapping[str, Any] | None = None
) -> tuple[Callable[..., TrainingSetup], Callable[[TrainingSetup, Any], Any]]:
    """Return ``make_setup`` and ``step`` of a LightningModule, for the checks.

    A real ``Trainer.fit`` runs, and stops whenever it wants a batch: it is handed that of the check. So every hook runs
    that Lightning calls, in its order, with accumulation, clipping and precision as the Trainer's arguments say;
    manual optimization, and steps that use ``self.trainer``, run as well.

    Args:
        make_module: builds the LightningModule anew; of ``lightning`` or of ``pytorch_lightning``.
        epoch_length: how many batches make an epoch, after which "epoch" schedulers step. None: no epoch ends.
        trainer_kwargs: arguments of ``Trainer``, copied for each setup (callbacks too).

    Returns:
        ``make_setup(device)`` and ``step(setup, batch)``. ``setup.model`` is the module; callbacks of the person's
        own classes are attributes of the setup, by the names of their classes; ``setup.state["trainer"]`` is what the
        Trainer's checkpoints hold beside weights, optimizers and schedulers. ``step`` returns the loss that
        ``training_step`` returned, undivided; where that returned none, a dict of what it logged.

    Raises:
        TypeError, ValueError: an argument is not what is allowed.

    Example:
        >>> make_setup, step = from_lightning(lambda: LitClassifier(lr=1e-3))
        >>> run_training(make_setup, batches, step, steps=20).assert_healthy()
    """
    setups = FedSetups(make_module, epoch_length, trainer_kwargs)

    @running(make_module)
    def step(setup: TrainingSetup, batch: Any) -> Any:
        return setups.step(setup, batch)

    return setups.make_setup, step
