"""What is not finite in a run, and where it came from."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import torch

from tl_telemetry._events import Backward, OptimizerStep
from tl_telemetry._evidence import Evidence, enough, number
from tl_telemetry._record import StepRecord, read
from tl_telemetry._replay import Made
from tl_telemetry._tensors import shown_name

# From this growth of the loss or the gradient norm on, values that overflow are the end of a divergence.
BLOWN_UP = 1e4

# What makes an operation's output NaN or infinite ("nan", "inf" or "" for both) when its inputs are finite, and what to
# do about it; the first pattern that matches the operation's name.
_REASONS: tuple[tuple[str, str, str, str], ...] = (
    (
        r"nll_loss",
        "nan",
        "no target is left to average over, all are ignore_index",
        "skip such a batch, or sum and divide by a count of at least 1",
    ),
    (
        r"^std|^var|Std|Var",
        "nan",
        "fewer than two values have no such spread",
        "skip such a batch, or use correction=0",
    ),
    (
        r"^log$|^log2$|^log10$",
        "inf",
        "the logarithm of 0",
        "clamp its input (`x.clamp(min=1e-8).log()`), or use log_softmax, logsigmoid or log1p",
    ),
    (
        r"^log$|^log2$|^log10$|^log1p$",
        "nan",
        "the logarithm of a negative number",
        "look at how its input can become negative; clamp it",
    ),
    (r"^sqrt$", "nan", "the square root of a negative number", "clamp its input at 0"),
    (
        r"^SqrtBackward|NormBackward|CdistBackward|StdBackward",
        "",
        "its slope is infinite at 0",
        "add an epsilon inside (`(x + 1e-8).sqrt()`)",
    ),
    (
        r"^PowBackward",
        "",
        "its slope is infinite at 0 for an exponent below 1, or the result is too large",
        "add an epsilon to what is raised to the power, or clamp it",
    ),
    (
        r"^rsqrt$|^reciprocal$|^div|^DivBackward|^ReciprocalBackward|^RsqrtBackward|^LogBackward",
        "",
        "a division by 0, or by almost 0",
        "add an epsilon to the divisor, or clamp it",
    ),
    (
        r"^exp$|^expm1$|^sinh$|^cosh$|^ExpBackward",
        "inf",
        "the result is too large",
        "subtract the maximum first (logsumexp, log_softmax), or clamp the exponent",
    ),
    (
        r"^(mul|add|sub|square|sum|mean|mm|addmm|bmm|baddbmm|addcmul|mse_loss|cumsum|prod|dot|mv)$|^convolution",
        "inf",
        "the result is too large",
        "scale the inputs down, or compute this part in a wider dtype",
    ),
    (
        r"^pow$",
        "inf",
        "the result is too large, or 0 is raised to a negative power",
        "clamp what is raised to the power",
    ),
)

# How an operation makes NaN of infinities that it is given, and what to do about it; the first pattern that matches.
_TURNS: tuple[tuple[str, str, str], ...] = (
    (
        r"[sS]oftmax|[lL]ogsumexp",
        "a row that masks everything leaves nothing to normalise",
        "leave at least one element of each row unmasked, or give such rows a value of their own (torch.where)",
    ),
    (
        r"^mul$|^addcmul$|^MulBackward",
        "a factor of 0 meets one of infinity, as in `p * p.log()` where p is 0",
        "take the infinity out of the factor, not out of the product: `p * log_p.masked_fill(p == 0, 0.0)`",
    ),
    (
        r"^(add|sub|rsub|sum|mean|cumsum|l1_loss|mse_loss|smooth_l1_loss)$",
        "infinities of opposite signs meet in a sum, or equal ones in a difference",
        "keep one of them finite: mask with torch.finfo(dtype).min instead of -inf, or choose with torch.where",
    ),
    (
        r"^div$|^DivBackward",
        "an infinity is divided by an infinity",
        "keep the divisor finite, or choose with torch.where before the division",
    ),
    (
        r"mm$|^(mv|dot|convolution)$",
        "0 times infinity, or infinities of opposite signs in the sum of the products",
        "give it finite values: replace the infinities before (masked_fill, torch.where)",
    ),
    (
        r"",
        "it is not defined for them",
        "look at where its infinite inputs come from, and replace them before it (masked_fill, torch.where)",
    ),
)


def nonfinite_losses(run: Evidence, record: StepRecord) -> dict[str, float]:
    """Return the losses that are not finite.

    Beside a main loss that is finite, those that were finite before and are not at the end of the run: what comes and
    goes is a figure that is not computed in every step, or a norm in a step that a GradScaler skips.
    """
    found = {name: value for name, value in record.losses.items() if not math.isfinite(value)}
    if found and record.loss is not None and math.isfinite(record.loss):
        found = {name: value for name, value in found.items() if _went_bad(run, name)}
    return found


def records_with_bad_losses(run: Evidence) -> list[StepRecord]:
    """Return the records with losses that are not finite, unless a guard kept them from the weights.

    A loss that no update used (its backward pass did not run, or what it left was cleared) is how a loop skips a bad
    batch, as long as that is the exception.
    """
    bad = [record for record in run.records if nonfinite_losses(run, record)]
    used = {number for _, event in run.steps for portion in event.portions for number in portion.source}
    used |= run.facts.recorder.gradients.held_passes()
    usual = statistics.mode(len(_passes(record, used)) for record in run.records) if run.records else 0
    if any(_optimised(record, used, usual) for record in bad) or enough(len(bad), len(run.records)):
        return bad
    return [record for record in bad if record.loss is not None and math.isfinite(record.loss)]


def _passes(record: StepRecord, used: set[int]) -> list[Backward]:
    """Return a record's backward passes that went into an update, or that gradients still held at the end."""
    return [event for event in record.events if isinstance(event, Backward) and event.number in used]


def _optimised(record: StepRecord, used: set[int], usual: int) -> bool:
    """Tell whether a record's loss was optimised: ``usual`` is how many passes of a step are."""
    passes = _passes(record, used)
    if len(passes) >= usual and record.optimizer_step_events:
        return True  # nothing was skipped (also where no gradient comes from backward())
    return any(event.root is None or not math.isfinite(event.root.value()) for event in passes)


def _went_bad(run: Evidence, name: str) -> bool:
    values = [record.losses[name] for record in run.records if name in record.losses]
    return math.isfinite(values[0]) and not math.isfinite(values[-1])


def nonfinite_gradients(run: Evidence, event: OptimizerStep) -> list[int]:
    """Return the parameters whose gradients held NaN or Inf when they were applied.

    The L2 norm of a finite gradient may overflow. NaN in a norm is NaN in the gradient; after an infinite gradient, a
    parameter does not end finite.
    """
    return [
        i
        for i, norm in zip(event.graded, event.norms.values(), strict=True)
        if i not in run.ignored
        and (math.isnan(norm) or (math.isinf(norm) and not _finite(run.tensors.entries[i].tensor)))
    ]


def nonfinite_updates(run: Evidence, event: OptimizerStep) -> list[int]:
    """Return the parameters that an update made NaN or Inf although its gradients were finite."""
    if event.updates is None or not all(map(math.isfinite, event.norms.values())):
        return []
    return [
        i
        for i, update in zip(event.graded, event.updates.values(), strict=True)
        # the norm of a large change may overflow, and it is NaN where it could not be measured: the parameter tells
        if i not in run.ignored and not math.isfinite(update) and not _finite(run.tensors.entries[i].tensor)
    ]


def explain_update(run: Evidence, step: int, event: OptimizerStep, hit: list[int]) -> tuple[str, str]:
    """Return (cause, fix) of an update that made non-finite values of finite gradients."""
    optimizer = run.setup.optimizers.get(event.optimizer)
    kind = event.optimizer if optimizer is None else type(optimizer).__name__
    rates = [lr for lr in map(read, event.lrs) if not math.isfinite(lr)]
    dtypes = sorted({str(run.tensors.entries[i].tensor.dtype).removeprefix("torch.") for i in hit})
    what = f"the arithmetic of {kind} itself: its update in step {step} made NaN or Inf of finite gradients"
    groups = [] if optimizer is None else optimizer.param_groups
    vanished = sorted({eps for group in groups if (eps := _vanished_epsilon(run, group, hit))})
    if vanished:
        return (
            f"{what}; in {' and '.join(dtypes)}, its eps of {vanished[0]:g} rounds to 0, and it divides by 0",
            "keep the weights in float32 and compute in low precision under torch.autocast, or raise eps",
        )
    if rates:
        return f"{what}, with a learning rate of {rates[0]:g}", "look at what sets the learning rate"
    return (
        f"{what} (weights in {' and '.join(dtypes)})",
        "look for a division or a square root in its step(), and at its settings; in low precision, keep the weights "
        "in float32",
    )


def _vanished_epsilon(run: Evidence, group: dict[str, Any], hit: list[int]) -> float:
    """Return a group's eps if it is too small for the dtype of some of the parameters; else 0."""
    eps = group.get("eps")
    if not isinstance(eps, float) or eps <= 0.0:
        return 0.0
    held = set(map(id, group["params"]))
    tensors = [run.tensors.entries[i].tensor for i in hit if id(run.tensors.entries[i].tensor) in held]
    return eps if any(float(torch.tensor(eps, dtype=t.dtype)) == 0.0 for t in tensors) else 0.0


def nonfinite_at_end(run: Evidence) -> list[str]:
    """Return the parameters, and the buffers that began finite, that held NaN or Inf at the end of the run."""
    if not run.facts.over:
        return []
    at_start = set(run.facts.start.nonfinite())
    model = run.setup.model
    tensors = {shown_name(name): tensor for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    tensors |= {entry.name: entry.tensor for entry in run.tensors.entries}
    parameters = {entry.name for entry in run.tensors.entries}
    known = parameters | run.facts.start.names()  # a mask that is made in the first forward pass may hold -Inf
    return [
        name
        for name in run.facts.end.nonfinite()
        if name in known and name not in at_start and name in tensors and not _finite(tensors[name])
    ]


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def began_nonfinite(run: Evidence) -> list[str]:
    """Return the parameters that held NaN or Inf when the run began."""
    parameters = {entry.name for entry in run.tensors.entries}
    return [name for name in run.facts.start.nonfinite() if name in parameters]


def explain_nonfinite(run: Evidence, first: int, *, at_end: bool) -> tuple[str, str, dict[str, object]]:
    """Say where the first non-finite value of a run came from; repeats the run up to that step.

    Args:
        run: the evidence.
        first: the step in which it appeared.
        at_end: whether it was only seen at the end of the run, in the weights.

    Returns:
        The cause, the fix, and what they are based on.
    """
    began_so = began_nonfinite(run)
    if began_so:
        return (
            f"{', '.join(began_so)} held NaN or Inf before the first step",
            "initialise them (torch.empty leaves whatever was in memory), or look at the checkpoint they come from",
            {"began_so": began_so},
        )
    origin = run.facts.origin(first)
    loss = run.records[first].loss
    in_backward = not at_end and loss is not None and math.isfinite(loss)
    made = _first(origin.made, in_backward) if origin else None
    turned = _first(origin.turned, in_backward) if origin else None
    operation = made or turned
    evidence: dict[str, object] = {"operation": str(operation) if operation else None}
    if origin and origin.batch:
        also = f"; besides, {_made_of(made, first)}" if made else ""
        return (
            f"the data: in step {first}, {origin.batch}{also}",
            "clean the data, or keep these elements away from the weights: torch.where, not a multiplication by 0",
            {**evidence, "batch": origin.batch},
        )
    grown = growth_before(run, first)
    if grown:
        overflow = f" (first in {operation})" if operation else ""
        return (
            f"the loop diverges: {grown} in the steps before step {first}, in which values overflowed{overflow}",
            "lower the learning rate; if it still grows, check the signs of the loss and of the update",
            evidence,
        )
    if made:
        then = f"; {turned} then made NaN of infinities" if turned and not made.nan else ""
        reason, fix = _reason(made)
        return f"{_made_of(made, first)}, before anything else did{reason}{then}", fix, evidence
    hidden = next((one for one in origin.made if one.nan and not one.backward), None) if origin else None
    if hidden and not turned:
        reason, _ = _reason(hidden)
        return (
            f"{_made_of(hidden, first)}{reason}. The loss does not show it (torch.where or a mask chose other values), "
            "but the gradient passes through it all the same, and 0 * NaN is NaN",
            "choose the input, not the result: give the operation a harmless value where it is not used "
            "(`torch.where(ok, x, 1.0).sqrt()`)",
            {"operation": str(hidden)},
        )
    if turned:
        how, fix = next((how, fix) for pattern, how, fix in _TURNS if re.search(pattern, turned.operation))
        return (
            f"{turned} made NaN of infinities in step {first}: {how}. The infinities were put there on purpose or were "
            "given, as in a mask of -inf",
            fix,
            evidence,
        )
    return (
        "undecided: an operation outside of its domain (sqrt or log of 0, division by 0), an overflow, data that holds "
        "NaN, or diverging weights",
        "check the batch of that step, and run it under torch.autograd.detect_anomaly() to see the operation",
        evidence,
    )


def _first(made: tuple[Made, ...], in_backward: bool) -> Made | None:
    """Return the operation that tells: where the loss was finite, infinities of the forward pass did no harm."""
    return next((one for one in made if one.backward == in_backward), None) or (
        None if in_backward else next(iter(made), None)
    )


def _made_of(made: Made, step: int) -> str:
    return f"{made} turned finite values into {'NaN' if made.nan else 'Inf'} in step {step}"


def _reason(made: Made) -> tuple[str, str]:
    """Return (what makes this operation do so, what to do about it)."""
    if made.given:
        return (
            ": one of its arguments is the number NaN or Inf",
            "mask with torch.where or masked_fill (0 * inf is NaN)",
        )
    if made.empty:
        return ": it had no element to work with", "skip what is empty, or divide by a count of at least 1"
    for pattern, kind, reason, fix in _REASONS:
        if kind in ("", "nan" if made.nan else "inf") and re.search(pattern, made.operation):
            too_large = "the result is too large" in reason
            if made.dtype is torch.float16 and too_large:
                return f": {reason} (float16 ends at 65504)", "compute this part in float32, or use bfloat16"
            return f": {reason}", fix
    return "", "look at its inputs: a value outside of its domain, or one that is too large for its dtype"


def growth_before(run: Evidence, first: int) -> str:
    """Say how the loss or a gradient norm had grown before a step; nothing if they had not by orders of magnitude."""
    records = run.records[:first]
    series = {"the loss": [abs(r.loss) for r in records if r.loss is not None and math.isfinite(r.loss)]}
    for name in run.steps_by_optimizer:
        norms = [record.grad_norm_before_clip.get(name, math.nan) for record in records]
        series[f"the gradient norm of {name!r}"] = [norm for norm in norms if math.isfinite(norm)]
    for what, values in series.items():
        if len(values) >= 3 and values[-1] >= BLOWN_UP * max(values[0], 1e-12):
            return f"{what} had grown from {number(values[0])} to {number(values[-1])}"
    return ""
