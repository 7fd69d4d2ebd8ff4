"""Rules about the scale of the loss."""

from __future__ import annotations

from tl_accum._context import Context
from tl_accum._vectors import Vector, added, dot, norm, only, ratio
from tl_accum._words import listed, number, times
from tl_core import Finding

# How many different factors may explain the gradients of all parameters.
MAX_FACTORS = 4


def scaled(context: Context) -> Finding | None:
    """See gradients that are a multiple of the full batch's."""
    factor = ratio(context.got, context.expected, context.rtol)
    if factor is None or not (context.is_kept or context.is_untraced) or _near(factor, 1.0, context.rtol):
        return None
    parts = context.num_parts
    if not norm(context.got):
        return Finding(
            "wrong-loss-scale",
            f"the accumulated gradients are all 0 (the full batch's have a norm of {number(norm(context.expected))})",
            f"the loss is multiplied by 0 for {parts} accumulation steps: an integer division (`1 // k`), or a weight "
            "that is 0",
            "call backward() on loss / k",
            evidence={"ratio": 0.0},
        )
    seen = (
        f"the accumulated gradients are {times(factor)} the full batch's (norm {number(norm(context.got))} instead of "
        f"{number(norm(context.expected))})"
    )
    evidence: dict[str, object] = {"ratio": factor}
    if _near(factor, parts, context.rtol) and not context.is_sum:
        return Finding(
            "loss-not-divided",
            seen,
            f"the loss is a mean over the micro-batch and is not divided by the {parts} accumulation steps",
            "call backward() on loss / k",
            evidence=evidence,
        )
    if _near(factor, 1.0 / parts, context.rtol):
        if context.is_sum:
            return Finding(
                "wrong-loss-scale",
                seen,
                f"the loss is a sum over the batch and is divided by the {parts} accumulation steps: sums of "
                "micro-batches are added, not averaged",
                "do not divide a summed loss by k",
                evidence=evidence,
            )
        return Finding(
            "loss-divided-twice",
            seen,
            f"the loss is divided by the {parts} accumulation steps twice",
            "divide it once: where it is computed, or where backward() is called",
            evidence=evidence,
        )
    divisor = parts / factor if context.is_mean else 1.0 / factor if context.is_sum else None
    due = f"{parts}" if context.is_mean else "1, since it is a sum"
    return Finding(
        "wrong-loss-scale",
        seen,
        "undecided: the scale of the loss depends on the accumulation steps in another way than it should"
        if divisor is None
        else f"the loss of a micro-batch is divided by {_shown(divisor)} instead of by {due}",
        "divide the loss by the number of micro-batches in the group",
        evidence={**evidence, "divisor": divisor},
    )


def roughly_scaled(context: Context) -> Finding | None:
    """See gradients of about ``k`` times the full batch's, or one ``k``-th, in a step that draws random numbers."""
    square = dot(context.expected, context.expected)
    if not square or not context.is_kept:
        return None
    factor, parts = dot(context.got, context.expected) / square, context.num_parts
    slack = 1.0 + 3.0 * context.comparison.spread
    if not slack**2 < parts:
        return None
    near = next((f for f in (float(parts), 1.0 / parts) if f / slack <= factor <= f * slack), None)
    if near is None:
        return None
    undivided = near > 1.0
    return Finding(
        "loss-not-divided" if undivided else "loss-divided-twice",
        f"the accumulated gradients are about {number(factor)} times the full batch's (norm "
        f"{number(norm(context.got))} instead of {number(norm(context.expected))}); the random numbers that the step "
        f"draws change that by up to {number(context.comparison.spread)}",
        f"the loss is a mean over the micro-batch and is not divided by the {parts} accumulation steps"
        if undivided
        else f"the loss is divided by the {parts} accumulation steps twice, or is a sum and divided once",
        "call backward() on loss / k" if undivided else "divide a mean once, and a sum not at all",
        evidence={"ratio": factor},
    )


def pass_scaled(context: Context) -> Finding | None:
    """See one of several backward passes of a micro-batch whose loss has another scale than the others."""
    ordinals = sorted({one.ordinal for one in context.passes})
    if len(ordinals) < 2 or not context.is_kept:
        return None
    told = []
    for ordinal in ordinals:
        made = added(one.added for one in context.passes if one.ordinal == ordinal)
        wanted = added(one.added for one in context.reference_passes if one.ordinal == ordinal)
        site = next(one.site for one in context.passes if one.ordinal == ordinal)
        factor = ratio(made, wanted, context.rtol)
        if factor is None:
            return None
        told.append((factor, site))
    wrong = [(factor, site) for factor, site in told if not _near(factor, 1.0, context.rtol)]
    if not wrong or len(wrong) == len(told):
        return None
    parts = context.num_parts
    undivided = all(_near(factor, parts, context.rtol) for factor, _ in wrong)
    where = listed(f"{times(factor)} from backward() at {site}" for factor, site in wrong)
    right = listed(f"{times(factor)} from {site}" for factor, site in told if (factor, site) not in wrong)
    return Finding(
        "loss-not-divided" if undivided else "wrong-loss-scale",
        f"the gradients of one of {len(told)} backward passes a micro-batch have another scale than the full batch's: "
        f"{where}, {right}",
        f"that loss is not divided by the {parts} accumulation steps, the others are"
        if undivided
        else "that loss is divided by another number than the others",
        "divide each loss that backward() is called on by k",
        evidence={"ratios": tuple(factor for factor, _ in told)},
    )


def mostly_scaled(context: Context) -> Finding | None:
    """See gradients that are multiples of the full batch's, by other factors for other parameters."""
    if not context.is_kept:
        return None
    factors, mixed = _factors(context)
    parts = context.num_parts
    undivided = [factor for factor in factors if _near(factor, parts, context.rtol)]
    if len(factors) + bool(mixed) < 2 or len(factors) > MAX_FACTORS or (mixed and not undivided):
        return None
    told = [f"{times(factor)} in {context.shown(names)}" for factor, names in factors.items()]
    if mixed:
        told.append(f"mixed in {context.shown(mixed)}")
    return Finding(
        "loss-not-divided" if undivided else "wrong-loss-scale",
        f"the accumulated gradients are other multiples of the full batch's for other parameters: {listed(told)}",
        f"a part of the loss is not divided by the {parts} accumulation steps: the one that alone reaches "
        f"{context.shown(factors[undivided[0]])}"
        if undivided
        else "undecided: parts of the loss are divided by different numbers, or the gradients of these parameters are",
        "divide the whole loss by k, after its terms are added",
        evidence={"ratios": tuple(factors)},
    )


def _factors(context: Context) -> tuple[dict[float, list[str]], list[str]]:
    """Return the factors that there are, with the parameters of each, and the parameters that have none."""
    found: dict[float, list[str]] = {}
    mixed = []
    for name in context.names:
        expected, got = only(context.expected, [name]), only(context.got, [name])
        if not _counts(context, expected) and not _counts(context, got):
            continue
        factor = ratio(got, expected, context.rtol)
        if factor is None:
            mixed.append(name)
            continue
        near = next((known for known in found if _near(factor, known, context.rtol)), factor)
        found.setdefault(near, []).append(name)
    return found, mixed


def _counts(context: Context, vector: Vector) -> bool:
    return norm(vector) > context.rtol * 1e-3 * norm(context.expected)


def _near(value: float, wanted: float, rtol: float) -> bool:
    return abs(value - wanted) <= max(rtol, 1e-3) * abs(wanted)


def _shown(value: float) -> str:
    return f"{round(value)}" if _near(value, max(1, round(value)), 1e-3) else number(value)
