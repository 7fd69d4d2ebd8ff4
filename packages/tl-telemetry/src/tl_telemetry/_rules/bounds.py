"""Rules about values that go out of bounds: non-finite, too large, growing, not falling."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._evidence import Evidence, at, number, several, telling
from tl_telemetry._record import StepRecord

# Growth that counts as divergence: the last quarter's median against the first quarter's.
NORM_GROWTH = 1e3
LOSS_GROWTH = 1e2
RISING_SHARE = 0.7


def non_finite(run: Evidence) -> Iterator[Finding]:
    """See losses, applied gradients and final parameters that are not finite."""
    bad_losses = [r for r in run.records if r.loss is not None and not math.isfinite(r.loss)]
    bad_others = [r for r in run.records if any(not math.isfinite(v) for v in r.losses.values())]
    bad_grads = [
        record
        for record, event in run.steps
        if any(
            not math.isfinite(n)
            for i, n in zip(event.graded, event.norms.values(), strict=True)
            if i not in run.ignored
        )
    ]
    final = run.facts.end.nonfinite() if run.facts.over else []
    began_so = set(run.facts.start.nonfinite()) if final else set()
    final = [name for name in final if name not in began_so]
    if not bad_grads and not bad_others and not final:
        return
    first = min((r.step for r in [*bad_grads, *bad_others]), default=len(run.records) - 1)
    where = []
    if bad_losses or bad_others:
        first_bad = (bad_losses or bad_others)[0]
        shown = ", ".join(f"{name} {value:g}" for name, value in first_bad.losses.items() if not math.isfinite(value))
        where.append(f"the loss was not finite in {at(r.step for r in bad_others)} ({shown})")
    if bad_grads:
        names = bad_grads[0].nonfinite_grads
        where.append(
            f"the gradients of {_names(run, names)} were not finite when applied, first in step {bad_grads[0].step}"
        )
    if final:
        where.append(f"{_names(run, tuple(final))} not finite at the end of the run")
    operation = _operation(run, first, bad_losses, bad_grads)
    if operation:
        cause = f"{operation} turned finite values into non-finite ones in step {first}, before anything else did"
        fix = "keep its input away from where it is undefined: add an epsilon (`(x + 1e-8).sqrt()`), clamp, or use a stable form"
    else:
        cause = "undecided: an operation outside of its domain (sqrt or log of 0, division by 0), an overflow, or diverging weights"
        fix = "run the step under torch.autograd.detect_anomaly() to see the operation"
    yield Finding(
        rule="non-finite",
        seen="; ".join(where),
        cause=cause,
        fix=fix,
        steps=telling(range(first, min(first + 2, len(run.records)))),
        parameters=bad_grads[0].nonfinite_grads if bad_grads else tuple(final),
        evidence={"first_step": first, "operation": operation},
    )


def _operation(run: Evidence, first: int, losses: list[StepRecord], grads: list[StepRecord]) -> str | None:
    if run.facts.find_nonfinite is None or not (losses or grads):
        return None
    try:
        return run.facts.find_nonfinite(first)
    except Exception:  # noqa: BLE001  a loop that cannot be run a second time only goes without this detail
        return None


def _names(run: Evidence, names: tuple[str, ...]) -> str:
    followed = [i for i, entry in enumerate(run.tensors.entries) if entry.name in names]
    buffers = sorted(set(names) - set(run.named(followed)))
    return ", ".join([run.shown(followed)] * bool(followed) + buffers)


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
        clipped = (
            f"; every such update was clipped (to {number(after)} there), which hides it"
            if after < 0.99 * before
            else ""
        )
        yield Finding(
            rule="grad-norm-exceeded",
            seen=f"the gradient norm of {name!r} before clipping was beyond {bound:g} in {len(over)} of "
            f"{several(len(norms), 'update')} ({at(s for s, _, _ in over)}): {number(before)} in step {step}{clipped}",
            cause="gradients are too large for the bound: targets or losses on an unusual scale, a learning rate that is too "
            "high, or exploding activations",
            fix="normalise the targets, lower the learning rate, or raise max_grad_norm if these norms are normal here",
            steps=telling(s for s, _, _ in over),
            evidence={"bound": bound, "largest": before, "updates": len(norms), "over": len(over)},
        )


def diverging(run: Evidence) -> Iterator[Finding]:
    """See gradient norms that grow by orders of magnitude through most of the run, together with the loss."""
    losses = [abs(record.loss) for record in run.records if record.loss is not None and math.isfinite(record.loss)]
    if len(losses) < 8 or _growth(losses) < LOSS_GROWTH or _rising(losses) < RISING_SHARE:
        return
    for name in run.steps_by_optimizer:
        norms = [r.grad_norm_before_clip[name] for r in run.records if name in r.grad_norm]
        finite = [norm for norm in norms if math.isfinite(norm)]
        if len(finite) < 8 or _growth(finite) < NORM_GROWTH or _rising(finite) < RISING_SHARE:
            continue
        lrs = run.records[0].lrs.get(name, ())
        yield Finding(
            rule="diverging",
            seen=f"the loss grew from {number(losses[0])} to {number(losses[-1])} and the gradient norm of {name!r} from "
            f"{number(finite[0])} to {number(finite[-1])}, through most of the {len(run.records)} steps",
            cause=f"the loop diverges: the learning rate ({', '.join(f'{lr:g}' for lr in sorted(set(lrs)))}) is too high for this "
            "loss, or the sign of the loss or of the update is wrong",
            fix="lower the learning rate by a factor of 10; if it still grows, check the signs",
            steps=telling(r.step for r in run.records),
            evidence={
                "first_loss": losses[0],
                "last_loss": losses[-1],
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
    yield Finding(
        rule="loss-not-decreasing",
        seen=f"the loss went from {number(first)} (mean of the first {several(quarter, 'step')}) to {number(last)} (of the last "
        f"{quarter}): a decrease of {100 * decrease:.3g} %, at least {100 * wanted:g} % expected",
        cause="undecided: the loss alone does not say why; a finding above this one is the likelier reason",
        fix="run more steps, or check the data and the loss function",
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
