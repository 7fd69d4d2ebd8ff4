"""``fit`` that is saved and resumed as Lightning does it, against one that never was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tl_core import TrainingSetup, noted
from tl_lightning._advice import RESUME, advised, in_words
from tl_lightning._extras import needs
from tl_lightning._fit import Hooks, loss_of, stepped_fit
from tl_lightning._flavor import flavor_of
from tl_lightning._own_code import running
from tl_lightning._setup import fill, own_callbacks, setup_of
from tl_telemetry import SteppedLoop

if TYPE_CHECKING:
    from tl_resume import ResumeReport

FORMS = "(trainer, module), (trainer, module, train_dataloaders or datamodule) or (..., ..., ..., val_dataloaders)"


def check_lightning_resume_equivalent(
    make_fit: Callable[[], tuple[Any, ...]],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Check that ``fit`` that is saved, killed and resumed with ``ckpt_path`` is the one that was never interrupted.

    The Trainer runs as it is, with its own loaders, and is stopped after each batch. It saves where ``ModelCheckpoint``
    does: at the end of a batch, after an epoch's last batch at the end of the epoch. ``tl_resume`` compares the runs,
    and establishes what makes them part.

    Args:
        make_fit: builds all anew: ``(trainer, module)``, and what else ``fit`` is given, the loaders or a data module.
        steps: how many batches the uninterrupted run trains on; at least 2. The Trainer must not end before.
        resume_at: the batch before which is saved. None: half of the steps, moved on to the first after an update.
        seed: seeds python, numpy and torch before ``make_fit`` is called; the resumed run gets the next one.
        rtol: relative tolerance of losses and weights; None is that of ``training_resume`` in ``tl_core.Tolerances``
            (1e-5).
        atol: absolute tolerance; None is that of ``training_resume`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        ImportError: tl-resume is not installed.
        TypeError, ValueError: an argument is not what is allowed. Exceptions from the given code pass through.
    """
    needs("tl_resume", "resume")
    from tl_resume import check_resume_equivalent

    fits = _Fits(make_fit, steps)

    @running(make_fit)
    def step(setup: TrainingSetup, index: int) -> Any:
        return fits.step(setup, index)

    try:
        report = check_resume_equivalent(
            fits.make_setup,
            lambda index: index,  # the Trainer has its own loader
            step,
            steps=steps,
            resume_at=resume_at,
            save=fits.save,
            load=fits.load,
            seed=seed,
            rtol=rtol,
            atol=atol,
            allow=allow,
        )
    finally:
        fits.close()
    return in_words(advised(report, RESUME), fits.callbacks)


def assert_lightning_resume_equivalent(
    make_fit: Callable[[], tuple[Any, ...]],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Assert that ``fit`` that is saved, killed and resumed with ``ckpt_path`` is the one that was never interrupted.

    The arguments are those of ``check_lightning_resume_equivalent``.

    Example:
        >>> assert_lightning_resume_equivalent(lambda: (make_trainer(), LitClassifier(), make_loader()), resume_at=4)

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: the resumed run is another one, or something was not restored.
        NotJudged: the loop differs so much from itself that nothing can be told.
        ImportError, TypeError, ValueError: as in ``check_lightning_resume_equivalent``.
    """
    return check_lightning_resume_equivalent(
        make_fit, steps=steps, resume_at=resume_at, seed=seed, rtol=rtol, atol=atol, allow=allow
    ).require()


class _Fits:
    """The fits of one check, each by the setup that it trains."""

    def __init__(self, make_fit: Callable[[], tuple[Any, ...]], steps: int) -> None:
        if not callable(make_fit):
            raise TypeError(f"make_fit must be a function that returns {FORMS}, got a {type(make_fit).__name__}")
        self._make_fit = make_fit
        self._steps = steps
        self._saved_in_epoch = False  # whether a checkpoint was saved before the last batch of its epoch
        self.callbacks: set[str] = set()  # names of the person's own
        self._running: WeakKeyDictionary[TrainingSetup, tuple[Any, SteppedLoop]] = WeakKeyDictionary()

    def make_setup(self) -> TrainingSetup:
        trainer, loop = self._begin(None)
        self.callbacks |= own_callbacks(trainer).keys()
        setup = setup_of(trainer)
        self._running[setup] = (trainer, loop)
        return setup

    def step(self, setup: TrainingSetup, index: int) -> Any:
        trainer, loop = self._running[setup]
        loss = None if loop.over else loop.advance()
        if loop.over:
            raise ValueError(
                f"Trainer.fit ended after {index} batches (max_steps={trainer.max_steps}, max_epochs="
                f"{trainer.max_epochs}), and steps={self._steps} needs {self._steps}"
            )
        result = dict(trainer.callback_metrics) if loss is None else loss
        if isinstance(result, dict) and not result:
            raise TypeError("training_step returned no loss and logged nothing: return the loss, or log it by self.log")
        return result

    def save(self, setup: TrainingSetup, path: Path) -> None:
        trainer, _ = self._running[setup]
        self._saved_in_epoch = not trainer.is_last_batch
        trainer.save_checkpoint(path)

    def load(self, setup: TrainingSetup, path: Path) -> None:
        self._running.pop(setup)[1].close()
        trainer, loop = self._begin(path)
        fill(setup, trainer)
        self._running[setup] = (trainer, loop)

    def close(self) -> None:
        for _, loop in list(self._running.values()):
            loop.close()

    def _begin(self, checkpoint: Path | None) -> tuple[Any, SteppedLoop]:
        """Begin a fit, and stop it before its first batch, with everything restored."""
        trainer, module, arguments = _arguments(self._make_fit())
        if checkpoint is not None:
            arguments["ckpt_path"] = checkpoint
        # where the run that saved stood: within an epoch, its loader's iterator was there and had drawn its seed
        within = checkpoint is not None and self._saved_in_epoch
        loop = stepped_fit(trainer, module, lambda pause: _hooks(pause, trainer, within), **arguments)
        with noted("raised in Trainer.fit, before the first batch"):
            loop.advance()
        if loop.over:
            raise ValueError("Trainer.fit ended before the first batch: look at the Trainer's limits and the loader")
        return trainer, loop


def _hooks(pause: Callable[..., Any], trainer: Any, within: bool) -> Hooks:
    """Pause before the first batch (``within`` an epoch, with the loader's iterator made), and after each batch."""
    losses: list[Any] = []

    def batch_ended(trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        losses[:] = [loss_of(outputs, trainer)]
        if not trainer.is_last_batch:
            pause(losses[0])

    def epoch_ended(trainer: Any, module: Any) -> None:
        if trainer.is_last_batch:
            pause(losses[0])

    hooks: Hooks = {"on_train_batch_end": batch_ended, "on_train_epoch_end": epoch_ended}
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
