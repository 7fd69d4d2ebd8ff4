"""What the fixtures hand out; imported by the first test that asks for one, since it imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

import tl_coverage
import tl_resume
import tl_telemetry
from tl_core import CheckFailed, NotJudged, Report, TrainingSetup
from tl_resume import ResumeReport
from tl_telemetry import TrainingRun

_OWN = frozenset({"tl_core", "tl_coverage", "tl_resume", "tl_telemetry", "tl_pytest"})
_LIBRARIES = sys.stdlib_module_names | {"numpy", "rich", "torch"}  # what the checks call for purposes of their own


class TrainingRunner:
    """The checks, bound to the device and the seed of the test; what the fixture ``training_runner`` gives.

    Args:
        device: The device that training runs on.
        seed: The seed that every run starts from.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed

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
        return tl_telemetry.run_training(
            make_setup,
            data,
            step,
            loss_fn=loss_fn,
            steps=steps,
            device=self.device if device is None else device,
            seed=self.seed if seed is None else seed,
            track_updates=track_updates,
        )

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
        return tl_telemetry.observe(setup, track_updates=track_updates, allow=allow)

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
        return tl_coverage.assert_optimizer_coverage(
            model, optimizers, ignore=ignore, allow_frozen=allow_frozen, no_decay=no_decay
        )

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
            rtol=rtol,
            atol=atol,
            allow=allow,
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
            allow=allow,
        )


def find_device(name: str, source: str) -> torch.device:
    """Turn the validated name of a device into the device, and fail the test when it is not there.

    Args:
        name: ``"cpu"``, ``"auto"`` or an accelerator's name with an optional index.
        source: Where the name was set, for the message.

    Returns:
        The device; an accelerator without an index is torch's current one.
    """
    if name == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    kind, _, index = name.partition(":")
    if accelerator is None:
        there = "no accelerator here"
    else:
        count = torch.accelerator.device_count()
        if accelerator.type == kind and (not index or int(index) < count):
            return torch.device(name)
        there = f"{count} of type {accelerator.type} here"
    pytest.fail(
        f"{source} asks for {name}, but torch {torch.__version__} sees {there}; "
        "auto takes the accelerator where there is one, else the CPU",
        pytrace=False,
    )


def without_own_frames(excinfo: pytest.ExceptionInfo[BaseException]) -> TracebackType:
    """Cut the frames of the checks from a traceback, so that it ends at the person's line.

    A verdict is cut, an error about an argument (a ValueError or TypeError that a check itself raises), and what the
    person's code raised when a check called it. Any other exception keeps its frames: it may come from a defect of the
    checks, and then they are what helps.

    Args:
        excinfo: The exception of a test or fixture.

    Returns:
        The traceback to show; the whole one when nothing would be left of it.
    """
    chain = []
    link: TracebackType | None = excinfo.tb
    while link is not None:
        chain.append(link)
        link = link.tb_next
    own = [number for number, link in enumerate(chain) if _is_own(link)]
    if not own:
        return excinfo.tb
    if not isinstance(excinfo.value, (CheckFailed, NotJudged)):
        below = chain[own[-1] + 1 :]  # what the innermost of the checks' functions called
        misuse = isinstance(excinfo.value, (ValueError, TypeError)) and not below
        persons = bool(below) and _module(below[0]).partition(".")[0] not in _LIBRARIES
        if not misuse and not persons:
            return excinfo.tb
    short: TracebackType | None = None
    for link in reversed(chain):
        # contextlib's frames stand between a check's context manager and the person's `with`
        if not _is_own(link) and _module(link) != "contextlib":
            short = TracebackType(short, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return short or excinfo.tb


def _is_own(link: TracebackType) -> bool:
    return _module(link).partition(".")[0] in _OWN


def _module(link: TracebackType) -> str:
    return str(link.tb_frame.f_globals.get("__name__", ""))
