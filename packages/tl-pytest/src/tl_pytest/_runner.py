"""What the fixtures hand out; imported by the first test that asks for one, since it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import tl_accum
import tl_amp
import tl_coverage
import tl_resume
import tl_telemetry
from tl_accum import AccumulationReport
from tl_core import Report, TrainingSetup
from tl_pytest import _hf, _lightning
from tl_pytest._common import Common
from tl_resume import ResumeReport
from tl_telemetry import TrainingRun


class TrainingRunner:
    """The checks, bound to the device and the seed of the test; what the fixture ``training_runner`` gives.

    Args:
        device: The device that training runs on.
        seed: The seed that every run starts from.
        common: What the checks of the test have in common: tolerances and allowed rules. None: nothing.
    """

    def __init__(self, device: str | torch.device, seed: int, common: Common | None = None) -> None:
        self.device = torch.device(device)
        self.seed = seed
        self._common = Common() if common is None else common

    def __repr__(self) -> str:
        return f"TrainingRunner(device={str(self.device)!r}, seed={self.seed})"

    def run(
        self,
        make_setup: Callable[..., Any],
        data: Any,
        step: Callable[[TrainingSetup, Any], Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        steps: int = 20,
        device: str | torch.device | None = None,
        seed: int | None = None,
        track_updates: bool = True,
    ) -> TrainingRun:
        """Train for a few steps and record each of them, as ``tl_telemetry.run_training`` does.

        Args:
            make_setup: Builds what a step uses: ``make_setup()`` or ``make_setup(device)``.
            data: One batch, a list of batches, a loader, or a function from the step's index to a batch.
            step: The person's step, ``step(setup, batch)``; either this or ``loss_fn``.
            loss_fn: A loss for the standard step, ``loss_fn(model, batch)``; either this or ``step``.
            steps: How many steps to run, at least 1.
            device: Where to run; None means the test's device.
            seed: The run's seed; None means the test's seed.
            track_updates: Whether to record how far each parameter moves, at the price of one copy of the parameters.

        Returns:
            The run, with its records and assertions.

        Raises:
            ValueError: An argument has a value that makes no sense.
            TypeError: An argument is of the wrong type.
        """
        run = tl_telemetry.run_training(
            make_setup,
            data,
            step,
            loss_fn=loss_fn,
            steps=steps,
            device=self.device if device is None else device,
            seed=self.seed if seed is None else seed,
            track_updates=track_updates,
        )
        allow = self._common.allowed("run")
        return self._common.kept(TrainingRun(run.facts, allow=allow) if allow else run)

    def observe(
        self, setup: TrainingSetup, *, track_updates: bool = True, allow: Sequence[str] = ()
    ) -> AbstractContextManager[TrainingRun]:
        """Watch a loop of the test's own, as ``tl_telemetry.observe`` does.

        Args:
            setup: What the loop trains with.
            track_updates: Whether to record how far each parameter moves.
            allow: Names of rules that the loop breaks on purpose.

        Returns:
            A context manager that yields the run.
        """
        allow = self._common.allowed("run", allow)
        return self._common.watched(tl_telemetry.observe(setup, track_updates=track_updates, allow=allow))

    def assert_optimizer_coverage(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        *,
        ignore: Sequence[str] = (),
        allow_frozen: bool = True,
        no_decay: Sequence[str] | None = None,
    ) -> Report:
        """Assert that every trainable parameter is updated by exactly one optimizer, as ``tl_coverage`` does.

        Args:
            model: The model.
            optimizers: One optimizer, a list, or a dict of named ones.
            ignore: Patterns (fnmatch) of parameters that are left out.
            allow_frozen: Whether optimizers may hold frozen parameters.
            no_decay: Patterns of parameters that weight decay must not reach.

        Returns:
            The report, when all is well.

        Raises:
            CheckFailed: A parameter is not covered as it should be.
        """
        if not self._common.allowed("coverage"):
            return tl_coverage.assert_optimizer_coverage(
                model, optimizers, ignore=ignore, allow_frozen=allow_frozen, no_decay=no_decay
            )
        report = tl_coverage.check_optimizer_coverage(
            model, optimizers, ignore=ignore, allow_frozen=allow_frozen, no_decay=no_decay
        )
        return self._common.without_allowed("coverage", report).require()

    def assert_resume_equivalent(
        self,
        make_setup: Callable[..., Any],
        data: Any,
        step: Callable[[TrainingSetup, Any], Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        steps: int = 8,
        resume_at: int | None = None,
        save: Callable[[TrainingSetup, Path], Any] | None = None,
        load: Callable[[TrainingSetup, Path], Any] | None = None,
        restores_step: bool = False,
        make_step: Callable[[], Callable[[TrainingSetup, Any], Any]] | None = None,
        fresh_process: bool = False,
        device: str | torch.device | None = None,
        seed: int | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        allow: Iterable[str] = (),
    ) -> ResumeReport:
        """Assert that a saved and resumed run is the uninterrupted one, as ``tl_resume.assert_resume_equivalent`` does.

        Args:
            make_setup: Builds what a step uses: ``make_setup()`` or ``make_setup(device)``.
            data: One batch, a list of batches, a loader, or a function from the step's index to a batch.
            step: The person's step, ``step(setup, batch)``; this, ``loss_fn`` or ``make_step``.
            loss_fn: A loss for the standard step, ``loss_fn(model, batch)``.
            steps: How many steps the uninterrupted run has, at least 2.
            resume_at: The step before which is saved; None means half of the steps.
            save: The person's ``save(setup, path)``; None, with ``load``, means ``save_training_state``.
            load: The person's ``load(setup, path)``.
            restores_step: Whether ``load`` must return or set the step to go on from.
            make_step: Builds the step anew for each run.
            fresh_process: Whether the resumed half runs in a process of its own.
            device: Where to run; None means the test's device.
            seed: The run's seed; None means the test's seed.
            rtol: Relative tolerance; None means that of ``training_resume``.
            atol: Absolute tolerance; None means that of ``training_resume``.
            allow: Names of rules that the loop breaks on purpose.

        Returns:
            The report, when all is well.

        Raises:
            CheckFailed: The resumed run is another one, or something was not restored.
            NotJudged: The loop differs so much from itself that nothing can be told.
        """
        return tl_resume.assert_resume_equivalent(
            make_setup,
            data,
            step,
            loss_fn=loss_fn,
            steps=steps,
            resume_at=resume_at,
            save=save,
            load=load,
            restores_step=restores_step,
            make_step=make_step,
            fresh_process=fresh_process,
            device=self.device if device is None else device,
            seed=self.seed if seed is None else seed,
            **self._common.tolerance("training_resume", self.device if device is None else device, rtol, atol),
            allow=self._common.allowed("resume", allow),
        )

    def assert_checkpoint_crash_safe(
        self,
        make_setup: Callable[..., Any],
        data: Any,
        step: Callable[[TrainingSetup, Any], Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        save: Callable[[TrainingSetup, Path], Any] | None = None,
        load: Callable[[TrainingSetup, Path], Any] | None = None,
        steps: int = 4,
        crash_points: int | None = None,
        seed: int | None = None,
        allow: Iterable[str] = (),
    ) -> Report:
        """Assert that a killed save leaves a checkpoint that loads, as ``tl_resume.assert_checkpoint_crash_safe`` does.

        The check runs on the CPU, whatever the test's device is: it forks, which an accelerator does not survive.

        Args:
            make_setup: Builds what a step uses: ``make_setup()`` or ``make_setup(device)``.
            data: One batch, a list of batches, a loader, or a function from the step's index to a batch.
            step: The person's step, ``step(setup, batch)``; either this or ``loss_fn``.
            loss_fn: A loss for the standard step, ``loss_fn(model, batch)``; either this or ``step``.
            save: The person's ``save(setup, path)``; None, with ``load``, means ``save_training_state``.
            load: The person's ``load(setup, path)``.
            steps: How many steps are trained, the first save after half of them; at least 2.
            crash_points: How many points inside of each file that is written; None means a few.
            seed: The run's seed; None means the test's seed.
            allow: Names of rules that the checkpoint breaks on purpose.

        Returns:
            The report, when all is well.

        Raises:
            CheckFailed: A crash, or a full disk, loses the last good checkpoint.
            NotJudged: The system cannot tell (no POSIX), or the save wrote nothing.
        """
        return tl_resume.assert_checkpoint_crash_safe(
            make_setup,
            data,
            step,
            loss_fn=loss_fn,
            save=save,
            load=load,
            steps=steps,
            crash_points=crash_points,
            seed=self.seed if seed is None else seed,
            allow=self._common.allowed("crash", allow),
        )

    def assert_accumulation_equivalent(
        self,
        make_setup: Callable[..., Any],
        data: Any,
        make_step: Callable[[int], Callable[[TrainingSetup, Any], Any]] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        accumulation_steps: int = 4,
        cycles: int = 2,
        epoch_length: int | None = None,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        disable_dropout: bool = True,
        device: str | torch.device | None = None,
        seed: int | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        allow: Iterable[str] = (),
    ) -> AccumulationReport:
        """Assert that accumulation makes the big batch's updates, as ``tl_accum.assert_accumulation_equivalent`` does.

        Args:
            make_setup: Builds what a step uses: ``make_setup()`` or ``make_setup(device)``.
            data: Full batches: one, a list, a loader, or a function from the cycle's number to a batch.
            make_step: ``make_step(k)`` returns the person's step for ``k`` accumulation steps; this or ``loss_fn``.
            loss_fn: A loss for the standard step, ``loss_fn(model, batch)``.
            accumulation_steps: Micro-batches in a cycle, at least 2.
            cycles: How many full batches are compared.
            epoch_length: Micro-batches in an epoch, whose incomplete last group is compared too.
            split: ``split(batch, parts)`` returns the micro-batches; None means ``tl_accum.split_batch``.
            disable_dropout: Whether dropout is off in all runs.
            device: Where to run; None means the test's device.
            seed: The run's seed; None means the test's seed.
            rtol: Relative tolerance; None means that of ``grad_accumulation``.
            atol: Absolute tolerance; None means that of ``grad_accumulation``.
            allow: Names of rules that the loop breaks on purpose.

        Returns:
            The report, when all is well.

        Raises:
            CheckFailed: Accumulation makes other updates than full batches.
            NotJudged: The two cannot be compared.
        """
        return tl_accum.assert_accumulation_equivalent(
            make_setup,
            data,
            make_step,
            loss_fn=loss_fn,
            accumulation_steps=accumulation_steps,
            cycles=cycles,
            epoch_length=epoch_length,
            split=split,
            disable_dropout=disable_dropout,
            device=self.device if device is None else device,
            seed=self.seed if seed is None else seed,
            **self._common.tolerance("grad_accumulation", self.device if device is None else device, rtol, atol),
            allow=self._common.allowed("accumulation", allow),
        )

    def assert_mixed_precision_training(
        self,
        make_setup: Callable[..., Any],
        data: Any,
        step: Callable[[TrainingSetup, Any], Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        steps: int = 20,
        every: int = 1,
        max_skipped_fraction: float = 0.25,
        device: str | torch.device | None = None,
        seed: int | None = None,
        allow: Iterable[str] = (),
    ) -> TrainingRun:
        """Assert that mixed precision is used right, as ``tl_amp.assert_mixed_precision_training`` does.

        Args:
            make_setup: Builds what a step uses: ``make_setup()`` or ``make_setup(device)``.
            data: One batch, a list of batches, a loader, or a function from the step's index to a batch.
            step: The person's step, ``step(setup, batch)``; either this or ``loss_fn``.
            loss_fn: A loss for the standard step, ``loss_fn(model, batch)``; either this or ``step``.
            steps: How many steps to run.
            every: How many steps make one update.
            max_skipped_fraction: Which share of the updates the GradScaler may skip, from 0 to 1.
            device: Where to run; None means the test's device.
            seed: The run's seed; None means the test's seed.
            allow: Names of rules that the loop breaks on purpose.

        Returns:
            The run, when all is well.

        Raises:
            CheckFailed: Mixed precision, or the GradScaler, is used wrong.
            NotJudged: Nothing could be judged.
        """
        run = tl_amp.assert_mixed_precision_training(
            make_setup,
            data,
            step,
            loss_fn=loss_fn,
            steps=steps,
            every=every,
            max_skipped_fraction=max_skipped_fraction,
            device=self.device if device is None else device,
            seed=self.seed if seed is None else seed,
            allow=self._common.allowed("mixed precision", allow),
        )
        return self._common.kept(run)

    # what Trainers run; each needs an extra of tl-pytest, and says so
    from_lightning = _lightning.from_lightning
    make_lightning_trainer = _lightning.make_lightning_trainer
    watch_lightning = _lightning.watch_lightning
    assert_lightning_resume_equivalent = _lightning.assert_lightning_resume_equivalent
    assert_lightning_accumulation_equivalent = _lightning.assert_lightning_accumulation_equivalent

    make_hf_trainer = _hf.make_hf_trainer
    watch_hf = _hf.watch_hf
    assert_hf_resume_equivalent = _hf.assert_hf_resume_equivalent
    assert_hf_accumulation_equivalent = _hf.assert_hf_accumulation_equivalent
    assert_hf_optimizer_coverage = _hf.assert_hf_optimizer_coverage
