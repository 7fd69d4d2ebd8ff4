"""The checks of what the Trainer of transformers runs; methods of ``TrainingRunner``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tl_accum import AccumulationReport
from tl_core import Report
from tl_pytest._extras import needed
from tl_resume import ResumeReport
from tl_telemetry import TrainingRun

if TYPE_CHECKING:
    from tl_pytest._runner import TrainingRunner


def make_hf_trainer(
    self: TrainingRunner,
    model: Any,
    train_dataset: Any,
    eval_dataset: Any = None,
    *,
    trainer_class: type[Any] | None = None,
    output_dir: Any = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    **overrides: Any,
) -> Any:
    """Make a Trainer set up for tests, as ``tl_hf.make_hf_trainer`` does.

    Args:
        model: The model; None with ``model_init``.
        train_dataset: What it trains on: a dataset, or a dict of tensors.
        eval_dataset: What it evaluates on.
        trainer_class: The Trainer's class; None means ``transformers.Trainer``.
        output_dir: Where checkpoints go; None means a temporary folder.
        device: Where it trains; None means the test's device.
        seed: The Trainer's seed; None means the test's seed.
        overrides: Arguments of ``TrainingArguments``, and of the Trainer's class.

    Returns:
        The Trainer.

    Raises:
        ImportError: tl-hf is not installed.
    """
    with needed("hf", "make_hf_trainer"):
        import tl_hf
    if trainer_class is not None:
        overrides["trainer_class"] = trainer_class
    return tl_hf.make_hf_trainer(
        model,
        train_dataset,
        eval_dataset,
        output_dir=output_dir,
        device=self.device if device is None else device,
        seed=self.seed if seed is None else seed,
        **overrides,
    )


def watch_hf(
    self: TrainingRunner, trainer: Any, *, track_updates: bool = True, allow: Iterable[str] = ()
) -> AbstractContextManager[TrainingRun]:
    """Watch a real ``trainer.train()``, as ``tl_hf.watch_hf`` does.

    Args:
        trainer: The Trainer that is to train.
        track_updates: Whether to record how far each parameter moves.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        A context manager that yields the run, with one record a micro-batch.

    Raises:
        ImportError: tl-hf is not installed.
    """
    with needed("hf", "watch_hf"):
        import tl_hf
    allow = self._common.allowed("run", allow)
    return self._common.watched(tl_hf.watch_hf(trainer, track_updates=track_updates, allow=allow))


def assert_hf_resume_equivalent(
    self: TrainingRunner,
    make_trainer: Callable[[], Any],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Assert that ``trainer.train(resume_from_checkpoint=...)`` is the uninterrupted run, as ``tl_hf`` does.

    Args:
        make_trainer: Returns a fresh Trainer.
        steps: How many updates the uninterrupted run has, at least 2.
        resume_at: The update before which is saved; None means half of the steps.
        seed: The run's seed; None means the test's seed.
        rtol: Relative tolerance; None means that of ``training_resume``.
        atol: Absolute tolerance; None means that of ``training_resume``.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: The resumed run is another one, or something was not restored.
        NotJudged: The training differs so much from itself that nothing can be told.
        ImportError: tl-hf is not installed.
    """
    with needed("hf", "assert_hf_resume_equivalent"):
        import tl_hf
    return tl_hf.assert_hf_resume_equivalent(
        make_trainer,
        steps=steps,
        resume_at=resume_at,
        seed=self.seed if seed is None else seed,
        **self._common.tolerance("training_resume", self.device, rtol, atol),
        allow=self._common.allowed("resume", allow),
    )


def assert_hf_accumulation_equivalent(
    self: TrainingRunner,
    make_trainer: Callable[[int], Any],
    data: Any = None,
    *,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    disable_dropout: bool = True,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Assert that ``gradient_accumulation_steps`` makes the big batch's updates, as ``tl_hf`` does.

    Args:
        make_trainer: ``make_trainer(k)`` returns a fresh Trainer for ``gradient_accumulation_steps=k``.
        data: Full batches; None means those of ``make_trainer(1).get_train_dataloader()``.
        accumulation_steps: Micro-batches in a cycle, at least 2.
        cycles: How many full batches are compared.
        epoch_length: Micro-batches in an epoch, whose incomplete last group is compared too.
        split: ``split(batch, parts)`` returns the micro-batches; None means ``tl_accum.split_batch``.
        disable_dropout: Whether dropout is off in all runs.
        seed: The run's seed; None means the test's seed.
        rtol: Relative tolerance; None means that of ``grad_accumulation``.
        atol: Absolute tolerance; None means that of ``grad_accumulation``.
        allow: Names of rules that the training breaks on purpose.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: Accumulation makes other updates than full batches.
        NotJudged: The two cannot be compared.
        ImportError: tl-hf is not installed.
    """
    with needed("hf", "assert_hf_accumulation_equivalent"):
        import tl_hf
    return tl_hf.assert_hf_accumulation_equivalent(
        make_trainer,
        data,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        seed=self.seed if seed is None else seed,
        **self._common.tolerance("grad_accumulation", self.device, rtol, atol),
        allow=self._common.allowed("accumulation", allow),
    )


def assert_hf_optimizer_coverage(
    self: TrainingRunner, trainer: Any, *, no_decay: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> Report:
    """Assert that the Trainer's optimizer holds every parameter once, in the right group, as ``tl_hf`` does.

    Args:
        trainer: The Trainer.
        no_decay: Patterns (fnmatch) of parameters that weight decay must not reach; None means biases and norms.
        ignore: Patterns of parameters that are left out.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: A parameter is not covered as it should be.
        ImportError: tl-hf is not installed.
    """
    with needed("hf", "assert_hf_optimizer_coverage"):
        import tl_hf
    if not self._common.allowed("coverage"):
        return tl_hf.assert_hf_optimizer_coverage(trainer, no_decay=no_decay, ignore=ignore)
    report = tl_hf.check_hf_optimizer_coverage(trainer, no_decay=no_decay, ignore=ignore)
    return self._common.without_allowed("coverage", report).require()
