"""The check that a crash in the middle of a save does not cost the checkpoint."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tl_core import Batches, Report, TrainingSetup, choose_step, preserve_rng
from tl_resume._crash._durable import NOT_SYNCED
from tl_resume._crash._judge import FULL, LOST, MIXED, POINTER, UNNOTICED
from tl_resume._crash._next import FAILS_AFTER_CRASH, LITTER
from tl_resume._crash._run import NOT_JUDGED, CrashRun, could_not_judge
from tl_resume._crash._trial import Trial
from tl_resume._files import load_training_state, save_training_state

# docs/rules.md has an entry for each, in this order
CRASH_FINDINGS = (LOST, FULL, MIXED, POINTER, NOT_SYNCED, FAILS_AFTER_CRASH)
CRASH_NOTES = (UNNOTICED, LITTER, NOT_JUDGED)

Step = Callable[[TrainingSetup, Any], Any]


def assert_checkpoint_crash_safe(
    make_setup: Callable[..., Any],
    data: Any,
    step: Step | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    save: Callable[[TrainingSetup, Path], Any] | None = None,
    load: Callable[[TrainingSetup, Path], Any] | None = None,
    steps: int = 4,
    crash_points: int | None = None,
    seed: int = 0,
    allow: Iterable[str] = (),
) -> Report:
    """Prove that a save which is killed, or meets a full disk, leaves a checkpoint that loads.

    Arguments and report are those of ``check_checkpoint_crash_safe``.

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: A crash costs the checkpoint; the message says where in the save, and why.
        NotJudged: Nothing could be judged; the message says why.
    """
    return check_checkpoint_crash_safe(
        make_setup,
        data,
        step,
        loss_fn=loss_fn,
        save=save,
        load=load,
        steps=steps,
        crash_points=crash_points,
        seed=seed,
        allow=allow,
    ).require()


def check_checkpoint_crash_safe(
    make_setup: Callable[..., Any],
    data: Any,
    step: Step | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    save: Callable[[TrainingSetup, Path], Any] | None = None,
    load: Callable[[TrainingSetup, Path], Any] | None = None,
    steps: int = 4,
    crash_points: int | None = None,
    seed: int = 0,
    allow: Iterable[str] = (),
) -> Report:
    """Kill the second save of a short run at many points, and see whether the checkpoint still loads whole.

    The loop runs once, on the CPU: half of its steps, a save, the other half. The second save, to the same path, is
    only done by forked processes, which die in it: at the first and the last byte of each file and between them,
    before each rename and removal, and with a full disk. After each, ``load`` into a fresh setup must give back the
    old or the new state, whole. What the checkpoint does not carry is not compared.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``; returns a fresh ``TrainingSetup`` or a
            ``(model, optimizer[, scheduler[, scaler[, state]]])`` tuple.
        data: One batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from the step
            index to a batch.
        step: ``step(setup, batch)``, the training step.
        loss_fn: ``loss_fn(model, batch)`` instead of ``step``; ``standard_step`` does the rest.
        save: ``save(setup, path)`` writes a file or a folder at ``path`` (a ``pathlib.Path``), and what it needs
            beside it; default ``save_training_state``.
        load: ``load(setup, path)`` restores a fresh setup; default ``load_training_state``.
        steps: How many steps the run has; at least 2.
        crash_points: How many points inside of each file that the save writes; None for a few, of a few files.
        seed: Seeds python, numpy and torch before ``make_setup`` is called.
        allow: Rules whose findings are wanted: ``"not-synced"`` and the others of ``docs/rules.md``.

    Returns:
        The report; not judged where processes cannot be forked, or ``save`` writes nothing or not before it returns.

    Raises:
        TypeError, ValueError: An argument is not what is allowed. Exceptions from the given code in what is not
            disturbed pass through, with a note of where they came from.
    """
    train_step = choose_step(step, loss_fn)
    save, load = _choose_functions(save, load)
    _check_number("steps", steps, 2)
    if crash_points is not None:
        _check_number("crash_points", crash_points, 1)
    allowed = _allowed(allow)
    batches = Batches(data, steps, device="cpu")
    if not hasattr(os, "fork"):
        return could_not_judge(f"the saves that die need os.fork, which {sys.platform} does not have")
    with preserve_rng(), tempfile.TemporaryDirectory(prefix="tl-resume-", ignore_cleanup_errors=True) as root:
        trial = Trial(os.path.realpath(root), save, load, seed)
        report = CrashRun(trial, steps, crash_points).judge(make_setup, batches, train_step, seed)
    report.findings = tuple(finding for finding in report.findings if finding.rule not in allowed)
    return report


def _choose_functions(save: Any, load: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if (save is None) != (load is None):
        given, missing = ("save", "load") if load is None else ("load", "save")
        raise TypeError(f"pass save and load together, got only {given}: {missing} must fit to what {given} does")
    if save is None:
        return save_training_state, load_training_state
    for name, function in (("save", save), ("load", load)):
        if not callable(function):
            raise TypeError(f"{name} must be a function {name}(setup, path), got {type(function).__name__}")
        try:
            inspect.signature(function).bind(None, None)
        except ValueError:  # no signature to be had
            continue
        except TypeError:
            got = f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
            raise TypeError(f"{name} must take the setup and a path, {name}(setup, path); got {got}") from None
    return save, load


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _allowed(allow: Iterable[str]) -> set[str]:
    if isinstance(allow, str):
        raise TypeError(f"allow must be a list of rules, got the string {allow!r}")
    allowed = set(allow)
    unknown = sorted(allowed - set(CRASH_FINDINGS))
    if unknown:
        raise ValueError(
            f"allow names no rule of this check: {', '.join(map(repr, unknown))}; "
            f"its rules are {', '.join(CRASH_FINDINGS)}"
        )
    return allowed
