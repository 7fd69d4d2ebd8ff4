"""The accumulation check's two faces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tl_accum._compare import compare, compare_frozen
from tl_accum._judge import judge
from tl_accum._plan import Split, Step, make_plan
from tl_accum._report import AccumulationReport
from tl_accum._rule_ids import FINDINGS, NOTES
from tl_accum._rules import check_reference
from tl_accum._session import Session
from tl_accum._tolerance import Bounds
from tl_core import Tolerances, check_rule_ids, standard_step

# A check seeds the generators of the whole process, and sets back what lies outside of the setup: threads wait.
_one_at_a_time = threading.RLock()


def check_accumulation_equivalent(
    make_setup: Callable[..., Any],
    data: Any,
    make_step: Callable[[int], Step] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Split | None = None,
    disable_dropout: bool = True,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Check that accumulating gradients over micro-batches makes the updates that full batches make.

    From identical fresh setups, one step of ``make_step(1)`` on each full batch, starting from zeroed gradients, is
    compared with one step of ``make_step(accumulation_steps)`` on each of its micro-batches: when optimizers and
    schedulers step, the gradients before clipping and as applied, learning rates, weights, and what is kept beside the
    model. After a cycle that agrees, the next one starts from the full batch's weights, so that rounding does not add
    up. Where something differs, further runs establish why.

    Gradients differ where an element lies further from the full batch's than ``atol + rtol * largest``, ``largest``
    being the largest of its parameter (at least 1 % of the largest of all). In low precision, ``rtol`` is at least 4
    units in the last place; where the loop differs from itself when it is repeated, three times that distance is
    allowed besides.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``; returns a fresh ``TrainingSetup`` or a
            ``(model, optimizer[, scheduler[, scaler[, state]]])`` tuple.
        data: full batches: one batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from
            the cycle's number to a batch.
        make_step: ``make_step(k)`` returns ``step(setup, batch)`` for ``k`` accumulation steps. A loop that has to know
            the whole group before its first micro-batch, to count its tokens, gives the step a further function:
            ``step.begin_group(setup, batches)`` is called with all micro-batches of each group before it.
        loss_fn: ``loss_fn(model, batch)`` instead of ``make_step``; ``standard_step`` does the rest.
        accumulation_steps: micro-batches in a cycle, at least 2.
        cycles: how many full batches are compared, at least 1. A leak into the next cycle shows from 2 on.
        epoch_length: micro-batches in an epoch. Where it is no multiple of ``accumulation_steps``, a whole epoch and
            the first cycle of the next one are fed, the incomplete last group against a full batch of the same
            examples. None: the length of a loader, where it has one (and at most 64 batches); else no epoch ends.
        split: ``split(batch, parts)`` returns a list of micro-batches; for an incomplete last group, ``parts`` is its
            size. None: ``split_batch``.
        disable_dropout: switch dropout off in all runs, however it is written (modules, functions, attention, RNNs).
        device: where the model and the batches are put.
        seed: seeds python, numpy and torch before ``make_setup`` is called, and (by the cycle) before each cycle.
        rtol: relative tolerance; None is that of ``grad_accumulation`` in ``tl_core.Tolerances`` (1e-4).
        atol: absolute tolerance; None is that of ``grad_accumulation`` (1e-6), or less where the gradients themselves
            are small.
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, a batch cannot be split, ``make_setup`` builds
            another setup in its second call, or ``make_step(1)``'s step makes no updates. Exceptions from the given
            code pass through, with a note of the cycle and micro-batch they came from.
    """
    allowed = check_rule_ids(allow, "allow", (*FINDINGS, *NOTES))
    if (make_step is None) == (loss_fn is None):
        got = "neither" if make_step is None else "both"
        raise TypeError(
            f"pass either make_step or loss_fn, got {got}: make_step(k) returns step(setup, batch) for k accumulation "
            "steps, loss_fn(model, batch) only computes the loss"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    tolerance = Tolerances().get("grad_accumulation", device, rtol=rtol, atol=atol)
    with _one_at_a_time:
        plan = make_plan(
            make_setup,
            data,
            make_step if loss_fn is None else lambda k: standard_step(loss_fn, accumulation_steps=k),  # type: ignore[arg-type]
            accumulation_steps=accumulation_steps,
            cycles=cycles,
            epoch_length=epoch_length,
            split=split,
            disable_dropout=disable_dropout,
            device=device,
            seed=seed,
        )
        session = Session(plan)
        try:
            found = compare(session, Bounds(tolerance.rtol, tolerance.atol, exact_atol=atol is not None))
            check_reference(found)
            return judge(found, None if found.agrees else compare_frozen(found), allowed)
        finally:
            session.close()


def assert_accumulation_equivalent(
    make_setup: Callable[..., Any],
    data: Any,
    make_step: Callable[[int], Step] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Split | None = None,
    disable_dropout: bool = True,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Assert that accumulating gradients over micro-batches makes the updates that full batches make.

    The arguments are those of ``check_accumulation_equivalent``.

    Example:
        >>> import torch
        >>> def make_setup():
        ...     model = torch.nn.Linear(4, 1)
        ...     return model, torch.optim.Adam(model.parameters())
        >>> def loss_fn(model, batch):
        ...     return model(batch).pow(2).mean()
        >>> report = assert_accumulation_equivalent(make_setup, torch.randn(8, 4), loss_fn=loss_fn)
        >>> print(report)
        Gradient accumulation: passed

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: accumulation makes other updates than full batches.
        NotJudged: the two cannot be compared: batch statistics, noise, gradients that are not finite.
        TypeError, ValueError: an argument is not what is allowed.
    """
    return check_accumulation_equivalent(
        make_setup,
        data,
        make_step,
        loss_fn=loss_fn,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        device=device,
        seed=seed,
        rtol=rtol,
        atol=atol,
        allow=allow,
    ).require()
