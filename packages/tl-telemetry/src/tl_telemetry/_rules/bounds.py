"""Rules about values that go out of bounds: non-finite, too large, growing, not falling."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import OptimizerStep
from tl_telemetry._evidence import Evidence, at, number, several, telling
from tl_telemetry._rules.finite import (
    began_nonfinite,
    explain_nonfinite,
    explain_update,
    growth_before,
    nonfinite_at_end,
    nonfinite_gradients,
    nonfinite_losses,
    nonfinite_updates,
    records_with_bad_losses,
)

# Growth that counts as divergence: the last quarter's median against the first quarter's.
NORM_GROWTH = 1e2
LOSS_GROWTH = 1e3
RISING_SHARE = 0.7


def non_finite(run: Evidence) -> Iterator[Finding]:
    """See losses, applied gradients and final parameters that are not finite."""
    bad_losses = records_with_bad_losses(run)
    bad_grads = {record.step: indices for record, event in run.steps if (indices := nonfinite_gradients(run, event))}
    final = nonfinite_at_end(run)
    if not bad_grads and not bad_losses and not final:
        return
    first = min([*(r.step for r in bad_losses), *bad_grads], default=len(run.records) - 1)
    spoiled = _first_bad_update(run, until=first)
    if spoiled is not None:
        first = spoiled[0]
    where = []
    if spoiled is not None:
        where.append(
            f"the update of {spoiled[1].optimizer!r} in step {first} made {run.shown(spoiled[2])} NaN or Inf, "
            "although its gradients were finite"
        )
    if bad_losses:
        shown = ", ".join(f"{name} {value:g}" for name, value in nonfinite_losses(run, bad_losses[0]).items())
        where.append(f"the loss was not finite in {at(r.step for r in bad_losses)} ({shown})")
    applied = min(bad_grads, default=None)
    if applied is not None:
        where.append(
            f"gradients that were not finite were applied in {at(bad_grads)}, first those of "
            f"{run.shown(bad_grads[applied])}"
        )
    if final:
        followed = [i for i, entry in enumerate(run.tensors.entries) if entry.name in final]
        names = [run.shown(followed)] * bool(followed) + sorted(set(final) - set(run.named(followed)))
        where.append(f"{', '.join(names)} held NaN or Inf at the end of the run")
    evidence: dict[str, object] = {}
    if spoiled is not None and not began_nonfinite(run):
        cause, fix = explain_update(run, *spoiled)
    else:
        cause, fix, evidence = explain_nonfinite(run, first, at_end=not bad_losses and applied is None)
    yield Finding(
        rule="non-finite",
        seen="; ".join(where),
        cause=cause,
        fix=fix,
        steps=telling(range(first, min(first + 2, len(run.records)))),
        parameters=run.named(bad_grads[applied]) if applied is not None else tuple(final),
        evidence={"first_step": first, **evidence},
    )


def _first_bad_update(run: Evidence, until: int) -> tuple[int, OptimizerStep, list[int]] | None:
    """Return the first update, up to step ``until``, that made non-finite values of finite gradients.

    At the end of a divergence, that is no fault of the optimizer's.
    """
    for record, event in run.steps:
        if record.step > until:
            break
        if hit := nonfinite_updates(run, event):
            return None if growth_before(run, record.step) else (record.step, event, hit)
    return None


def grad_norm_exceeded(run: Evidence) -> Iterator[Finding]:
    """See gradient norms, before clipping, beyond ``max_grad_norm``."""
    bound = run.options.max_grad_norm
    if bound is None:
        return
    for name in run.steps_by_optimizer:
        norms = [(r.step, r.grad_norm_before_clip[name], r.grad_norm[name]) for r in run.records if name in r.grad_norm]
        over = [(step, before, after) for step, before, after in norms if not before <= bound]
        if not over:
            continue
        step, before, after = max(over, key=lambda row: row[1] if math.isfinite(row[1]) else math.inf)
        clipped = f"; the clip to {number(after)} hides it" if after < 0.99 * before else ""
        yield Finding(
            rule="grad-norm-exceeded",
            seen=f"the gradient norm of {name!r} before clipping was beyond {bound:g} in {len(over)} of "
            f"{several(len(norms), 'update')} ({at(s for s, _, _ in over)}), the largest {number(before)} in step "
            f"{step}{clipped}",
            cause="undecided: targets or losses on an unusual scale, a learning rate that is too high, "
            "exploding activations, or a bound that is too low for this model",
            fix="compare the norms with those of a run that trained well: then normalise the targets, "
            "lower the learning rate, or raise max_grad_norm",
            steps=telling(s for s, _, _ in over),
            evidence={"bound": bound, "largest": before, "updates": len(norms), "over": len(over)},
        )


def diverging(run: Evidence) -> Iterator[Finding]:
    """See gradient norms that grow by orders of magnitude through most of the run, together with the loss."""
    signed = [record.loss for record in run.records if record.loss is not None and math.isfinite(record.loss)]
    losses = [abs(loss) for loss in signed]
    if len(losses) < 8 or _growth(losses) < LOSS_GROWTH or _rising(losses) < RISING_SHARE:
        return
    for name in run.steps_by_optimizer:
        norms = [r.grad_norm_before_clip[name] for r in run.records if name in r.grad_norm]
        finite = [norm for norm in norms if math.isfinite(norm)]
        if len(finite) < 8 or _growth(finite) < NORM_GROWTH or _rising(finite) < RISING_SHARE:
            continue
        lrs = sorted({lr for record in run.records for lr in record.lrs.get(name, ())})
        rates = f"{lrs[0]:g}" + (f" to {lrs[-1]:g}" if len(lrs) > 1 else "") if lrs else "unknown"
        yield Finding(
            rule="diverging",
            seen=f"the loss went from {number(signed[0])} to {number(signed[-1])} and the gradient norm of {name!r} "
            f"from {number(finite[0])} to {number(finite[-1])}, through most of the {len(run.records)} steps (learning "
            f"rate {rates})",
            cause="undecided: the learning rate is too high for this loss, or a sign is wrong (a loss that should be "
            "maximised, an update that adds the gradient)",
            fix="lower the learning rate by a factor of 10; if the loss still grows, check the signs",
            steps=telling(r.step for r in run.records),
            evidence={
                "first_loss": signed[0],
                "last_loss": signed[-1],
                "first_norm": finite[0],
                "last_norm": finite[-1],
            },
        )


def loss_not_decreasing(run: Evidence) -> Iterator[Finding]:
    """See losses that do not fall by ``min_relative_decrease``: last quarter's mean against the first's."""
    wanted = run.options.min_relative_decrease
    if wanted is None:
        return
    losses = [record.loss for record in run.records if record.loss is not None]
    if len(losses) < 2:
        return
    quarter = max(1, len(losses) // 4)
    first, last = statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
    if last <= first - wanted * abs(first):
        return
    decrease = (first - last) / abs(first) if first and math.isfinite(first) else math.nan
    if math.isnan(decrease):
        changed = "not a number"
    else:
        changed = f"{'a decrease' if decrease >= 0 else 'an increase'} of {100 * abs(decrease):.3g} %"
    yield Finding(
        rule="loss-not-decreasing",
        seen=f"the loss went from {number(first)} (mean of the first {several(quarter, 'step')}) to {number(last)} (of "
        f"the last {quarter}): {changed}, a decrease of at least {100 * wanted:g} % was expected",
        cause="undecided: the loss alone does not say why; if the report has other findings, those are likelier "
        "reasons",
        fix="run more steps, print run.table(), and check the learning rate, the data and the loss function",
        evidence={"first_quarter": first, "last_quarter": last, "decrease": decrease},
    )


def _growth(values: list[float]) -> float:
    quarter = max(1, len(values) // 4)
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    return last / first if first > 0 else 0.0


def _rising(values: list[float]) -> float:
    """Return the share of steps from one value to the next that go up."""
    ups = sum(b > a for a, b in itertools.pairwise(values))
    return ups / (len(values) - 1)
