"""The check of mixed precision, with its two faces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tl_amp._raised import in_scaler, raised
from tl_amp._rule_ids import AMP_FINDINGS, AMP_NOTES, EXPLAINS
from tl_amp._rules import rules
from tl_amp._rules.unscaling import unscaled_again
from tl_amp._scale_free import Repeat, depends_on_scale, repeating
from tl_core import CheckFailed, Report, TrainingSetup, check_rule_ids
from tl_telemetry import TrainingRun, run_training

CHECK = "Mixed precision training"


def check_mixed_precision_training(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = 20,
    every: int = 1,
    max_skipped_fraction: float = 0.25,
    device: str | torch.device = "cpu",
    seed: int = 0,
    allow: Iterable[str] = (),
) -> Report:
    """Judge whether a loop uses mixed precision and its GradScaler right; the arguments are those of the assertion."""
    return _judge(make_setup, data, step, loss_fn, steps, every, max_skipped_fraction, device, seed, allow)[1]


def assert_mixed_precision_training(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = 20,
    every: int = 1,
    max_skipped_fraction: float = 0.25,
    device: str | torch.device = "cpu",
    seed: int = 0,
    allow: Iterable[str] = (),
) -> TrainingRun:
    """Train a few steps and demand that mixed precision, and the GradScaler, are used right.

    Without a GradScaler, what is judged are non-finite values, low-precision losses and updates that round away.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``; returns a fresh ``TrainingSetup`` or a
            ``(model, optimizer[, scheduler[, scaler[, state]]])`` tuple.
        data: one batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from the step
            index to a batch.
        step: ``step(setup, batch)``, the training step; returns a scalar loss or a dict of named ones.
        loss_fn: ``loss_fn(model, batch)`` instead of ``step``; ``standard_step`` does the rest.
        steps: how many steps to run.
        every: how many steps make one update. Only needed with a scaler that is not torch's: updates that torch's
            GradScaler is asked for are counted as they are.
        max_skipped_fraction: which share of an optimizer's updates its scaler may skip, from 0 to 1. The first updates,
            in which a scale that starts too high comes down, do not count.
        device: where the model and the batches are put.
        seed: seeds python, numpy and torch before ``make_setup`` is called.
        allow: ids of rules that may be broken.

    Returns:
        The run.

    Raises:
        CheckFailed: there are findings. Where the GradScaler itself raised, its error is the cause (``__cause__``).
        NotJudged: nothing could be judged.
        TypeError, ValueError: an argument is not what is allowed. Other exceptions from the given code pass through.
    """
    run, report = _judge(make_setup, data, step, loss_fn, steps, every, max_skipped_fraction, device, seed, allow)
    try:
        report.require()
    except CheckFailed as failed:
        raise failed from run.error
    return run


def _judge(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any] | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    steps: int,
    every: int,
    max_skipped_fraction: float,
    device: str | torch.device,
    seed: int,
    allow: Iterable[str],
) -> tuple[TrainingRun, Report]:
    allowed = check_rule_ids(allow, "allow", (*AMP_FINDINGS, *AMP_NOTES))
    _check_every(every)
    share = _check_share(max_skipped_fraction)
    run = run_training(
        make_setup, data, step, loss_fn=loss_fn, steps=steps, device=device, seed=seed, catch=(Exception,)
    )
    judging = rules(every, share)
    if run.error is not None:
        if not in_scaler(run.error):
            raise run.error
        judging = (unscaled_again, raised(run.error))
    report = run.judge(
        judging, check=CHECK, notes=AMP_NOTES, allow=allowed, explains=EXPLAINS, every=every if every > 1 else None
    )
    if run.error is None and not report.findings and not isinstance(data, Iterator):
        _look_at_scale(run, report, make_setup, repeating(data, step, loss_fn, device, seed), allowed)
    if run.error is not None:
        if not report.findings:
            raise run.error  # its finding is allowed: the error is not
        report.notes = ()  # what a run that broke off could not show
    run.adopt(report)
    return run, report


def _look_at_scale(
    run: TrainingRun, report: Report, make_setup: Callable[..., Any], repeat: Repeat, allowed: frozenset[str]
) -> None:
    """See whether gradients depend on the loss scale, where no rule has found anything."""
    if "depends-on-scale" in allowed:
        return
    found = depends_on_scale(run.evidence(), make_setup, repeat)
    if found is None or found.rule in allowed:
        return
    if found.rule in AMP_NOTES:
        report.notes += (found,)
        return
    report.findings, report.judged = (found,), True
    report.detail = "Telemetry:\n" + run.table(found.steps)


def _check_every(every: int) -> None:
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every must be an int, got {every!r}")
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")


def _check_share(share: float) -> float:
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise TypeError(f"max_skipped_fraction must be a number, got {share!r}")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"max_skipped_fraction must lie between 0 and 1, got {share!r}")
    return float(share)
