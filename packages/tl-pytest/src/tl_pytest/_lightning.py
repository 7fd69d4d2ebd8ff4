"""The checks of what Lightning's Trainer runs; methods of ``TrainingRunner``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tl_accum import AccumulationReport
from tl_core import TrainingSetup
from tl_pytest._extras import needed
from tl_resume import ResumeReport
from tl_telemetry import TrainingRun

if TYPE_CHECKING:
    from tl_pytest._runner import TrainingRunner


def make_lightning_trainer(
    self: TrainingRunner, *, device: str | torch.device | None = None, **trainer_kwargs: Any
) -> Any:
    """Make a Trainer set up for tests, as ``tl_lightning.make_lightning_trainer`` does.

    Args:
        device: Where it trains; None means the test's device.
        trainer_kwargs: Arguments of ``Trainer``, which win over those for tests.

    Returns:
        The Trainer.

    Raises:
        ImportError: tl-lightning, or Lightning itself, is not installed.
    """
    with needed("lightning", "make_lightning_trainer"):
        import tl_lightning
    return tl_lightning.make_lightning_trainer(device=self.device if device is None else device, **trainer_kwargs)


def from_lightning(
    self: TrainingRunner,
    make_module: Callable[[], Any],
    *,
    epoch_length: int | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Callable[[Any], TrainingSetup], Callable[[TrainingSetup, Any], Any]]:
    """Return ``make_setup`` and ``step`` of a LightningModule, as ``tl_lightning.from_lightning`` does.

    Args:
        make_module: Builds the LightningModule anew.
        epoch_length: How many batches make an epoch, after which "epoch" schedulers step; None: no epoch ends.
        trainer_kwargs: Arguments of ``Trainer``.

    Returns:
        ``make_setup(device)`` and ``step(setup, batch)``, for ``run`` and the other checks.

    Raises:
        ImportError: tl-lightning is not installed.
    """
    with needed("lightning", "from_lightning"):
        import tl_lightning
    return tl_lightning.from_lightning(make_module, epoch_length=epoch_length, trainer_kwargs=trainer_kwargs)


def watch_lightning(
    self: TrainingRunner, trainer: Any, *, track_updates: bool = True, allow: Iterable[str] = ()
) -> AbstractContextManager[TrainingRun]:
    """Watch a real ``trainer.fit(...)``, as ``tl_lightning.watch_lightning`` does.

    Args:
        trainer: The Trainer that is to train.
        track_updates: Whether to record how far each parameter moves.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        A context manager that yields the run, with one record a batch.

    Raises:
        ImportError: tl-lightning is not installed.
    """
    with needed("lightning", "watch_lightning"):
        import tl_lightning
    allow = self._common.allowed("run", allow)
    return self._common.watched(tl_lightning.watch_lightning(trainer, track_updates=track_updates, allow=allow))


def assert_lightning_resume_equivalent(
    self: TrainingRunner,
    make_fit: Callable[[], tuple[Any, ...]],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Assert that ``trainer.fit(ckpt_path=...)`` goes on with the uninterrupted run, as ``tl_lightning`` does.

    Args:
        make_fit: Returns a fresh ``(trainer, module[, train_dataloaders or datamodule[, val_dataloaders]])``.
        steps: How many batches the uninterrupted run has, at least 2.
        resume_at: The batch before which is saved; None means half of the steps.
        seed: The run's seed; None means the test's seed.
        rtol: Relative tolerance; None means that of ``training_resume``.
        atol: Absolute tolerance; None means that of ``training_resume``.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: The resumed run is another one, or something was not restored.
        NotJudged: The training differs so much from itself that nothing can be told.
        ImportError: tl-lightning is not installed.
    """
    with needed("lightning", "assert_lightning_resume_equivalent"):
        import tl_lightning
    return tl_lightning.assert_lightning_resume_equivalent(
        make_fit,
        steps=steps,
        resume_at=resume_at,
        seed=self.seed if seed is None else seed,
        **self._common.tolerance("training_resume", self.device, rtol, atol),
        allow=self._common.allowed("resume", allow),
    )


def assert_lightning_accumulation_equivalent(
    self: TrainingRunner,
    make_module: Callable[[], Any],
    data: Any,
    *,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    disable_dropout: bool = True,
    trainer_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Assert that ``accumulate_grad_batches`` makes the big batch's updates, as ``tl_lightning`` does.

    Args:
        make_module: Builds the LightningModule anew.
        data: Full batches: one, a list, a loader, or a function from the cycle's number to a batch.
        accumulation_steps: Micro-batches in a cycle, at least 2.
        cycles: How many full batches are compared.
        epoch_length: Micro-batches in an epoch, whose incomplete last group is compared too.
        split: ``split(batch, parts)`` returns the micro-batches; None means ``tl_accum.split_batch``.
        disable_dropout: Whether dropout is off in all runs.
        trainer_kwargs: Arguments of ``Trainer``.
        device: Where to run; None means the test's device.
        seed: The run's seed; None means the test's seed.
        rtol: Relative tolerance; None means that of ``grad_accumulation``.
        atol: Absolute tolerance; None means that of ``grad_accumulation``.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: Accumulation makes other updates than full batches.
        NotJudged: The two cannot be compared.
        ImportError: tl-lightning is not installed.
    """
    with needed("lightning", "assert_lightning_accumulation_equivalent"):
        import tl_lightning
    return tl_lightning.assert_lightning_accumulation_equivalent(
        make_module,
        data,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        trainer_kwargs=trainer_kwargs,
        device=self.device if device is None else device,
        seed=self.seed if seed is None else seed,
        **self._common.tolerance("grad_accumulation", self.device if device is None else device, rtol, atol),
        allow=self._common.allowed("accumulation", allow),
    )
