"""Rules about losses whose micro-batches do not add up to the full batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tl_accum._context import Context
from tl_accum._counts import candidates
from tl_accum._differences import tensors_of
from tl_accum._rules.probes import moving_figures
from tl_accum._vectors import Vector, added, dot, largest, made_of, minus, norm, num_elements, only, ratio
from tl_accum._words import listed, number
from tl_core import Finding
from tl_telemetry import Piece

# How far the shares of micro-batches lie from equal ones, at least, where they are the cause.
LEAST_UNEQUAL = 0.02
# How far terms may lie apart that are the same in every micro-batch, at the most: relative to their length.
ALIKE = 0.05
# How much of a term may be left beside the multiple of the weights that it is said to be, relative to its length.
PLAIN = 1e-3
# How many times what its gradients may be off by a term must be, for its shape to tell anything.
FAR_ABOVE = 10.0
# How many elements a term must have, at least, for its shape to tell anything: one is a multiple of any other.
FEWEST = 4


def constant_term(context: Context) -> Finding | None:
    """See a term of the loss that does not depend on the data and is added in every micro-batch, undivided."""
    parts = context.num_parts
    if not context.is_kept or not context.singles:
        return None
    share = _share(context)
    if share is not None and abs(share - 1.0) <= context.rtol:
        return _constant_in_sum(context)
    # what a step for one accumulation step makes of a micro-batch holds the term once, and so does the accumulated
    # step: mine = single / k + (1 - 1 / k) * term
    rest = 1.0 - 1.0 / parts
    terms = [
        added([mine, single], [1.0 / rest, -1.0 / parts / rest])
        for mine, single in zip(context.increments, context.singles, strict=True)
    ]
    term = added(terms, [1.0 / parts] * parts)
    size = norm(term)
    if size <= context.rtol * norm(context.expected):
        return None
    alike = min(ALIKE, 10 * context.rtol)
    if any(norm(added([one, term], [1.0, -1.0])) > alike * size for one in terms):
        return None
    if not context.same(added([context.expected, term], [1.0, float(parts - 1)]), context.got):
        return None
    reached = [name for name, value in term.items() if float(value.abs().max()) > context.rtol * 1e-3 * size]
    what = _penalty(context, only(term, reached), 1.0 / (parts - 1))
    return Finding(
        "constant-term",
        f"the accumulated gradients hold {parts} times a term that the full batch's hold once: it is the same in every "
        f"micro-batch (norm {number(size)}, in {context.shown(reached)}), so that the norm is "
        f"{number(norm(context.got))} instead of {number(norm(context.expected))}",
        f"a term of the loss that does not depend on the data{what} is added to each micro-batch's loss after that was "
        f"divided by {parts}",
        "divide the whole loss by k, the term included; or add the term in one micro-batch of the group",
        evidence={"term_norm": size},
    )


def _constant_in_sum(context: Context) -> Finding | None:
    """See a penalty on the weights that is added to each micro-batch's part of a sum over the group.

    Then nothing is divided, and the term is what the accumulated gradients have too much of, ``k - 1`` times. Only its
    shape, that of a penalty, tells it from data.
    """
    parts = context.num_parts
    factor = 1.0 / (parts - 1)
    term = added([context.got, context.expected], [factor, -factor])
    size = norm(term)
    if size <= context.rtol * norm(context.expected):
        return None
    reached = [name for name, value in term.items() if float(value.abs().max()) > context.rtol * size]
    if not (what := _penalty(context, only(term, reached), factor)):
        return None
    return Finding(
        "constant-term",
        f"the accumulated gradients hold {parts} times a term that the full batch's hold once (norm {number(size)}, in "
        f"{context.shown(reached)}), so that the norm is {number(norm(context.got))} instead of "
        f"{number(norm(context.expected))}",
        f"a term of the loss that does not depend on the data{what} is added to each micro-batch's part of the sum",
        "add the term in one micro-batch of the group, or divide it by k",
        evidence={"term_norm": size},
    )


def _penalty(context: Context, term: Vector, share: float) -> str:
    """Say which penalty on the weights a term is, where its gradient shows it.

    Args:
        context: the update.
        term: the term's gradient.
        share: how much of the term is one of what the accumulated gradients have too much.
    """
    run = context.comparison.run
    held = tensors_of(run.groups[context.number].start, Piece("weights"))
    weights = only(held, term)
    if weights.keys() != term.keys() or any(weights[name].shape != value.shape for name, value in term.items()):
        return ""
    allowed = context.comparison.bounds.of(context.expected)
    errors = {name: share * allowed.get(name, max(allowed.values(), default=0.0)) for name in term}
    if (factor := _multiple(term, weights, errors)) is not None:
        return f" (its gradient is {number(factor)} times the weights: an L2 penalty)"
    signs = {name: torch.sign(value) for name, value in weights.items()}
    if (factor := _multiple(term, signs, errors)) is not None:
        return f" (its gradient is {number(factor)} times the weights' signs: an L1 penalty)"
    return ""


def _multiple(term: Vector, shape: Vector, errors: Mapping[str, float]) -> float | None:
    """Return the factor by which a term is a multiple of a shape; None unless that is plain in every parameter.

    What the multiple leaves of the term must be what rounding may leave, and the term far more than that: weights are
    no gradients, so that beside their size anything would be small.

    Args:
        term: the term's gradient.
        shape: what it may be a multiple of.
        errors: how far each parameter's elements of the term may be off.
    """
    square = dot(shape, shape)
    if not square or num_elements(term) < FEWEST:
        return None
    factor = dot(term, shape) / square
    told = False
    for name, value in term.items():
        rest = largest(minus({name: value}, {name: factor * shape[name]}))
        if rest > max(errors[name], PLAIN * largest({name: value})):
            return None
        told = told or largest({name: value}) > FAR_ABOVE * errors[name]
    return factor if told and norm(added([term, shape], [1.0, -factor])) <= PLAIN * norm(term) else None


def mean_of_means(context: Context) -> Finding | None:
    """See means over numbers of elements that differ between micro-batches."""
    share = _share(context)
    if share is None or not context.is_kept:
        return None
    parts = context.num_parts
    averaged = abs(share * parts - 1.0) <= context.rtol
    weighs = f"1/{parts}" if averaged else number(share)
    beside = "" if averaged else _also(share, parts, context.rtol)
    fits = []
    for counts in candidates(context.group.parts, context.group.full):
        shares = [count / counts.total for count in counts.numbers]
        made = added(context.singles, shares)
        if not _alike(shares, share, context.rtol) and context.same(made, context.expected):
            fits.append((norm(added([made, context.expected], [1.0, -1.0])), counts))
    if fits:
        counts = min(fits, key=lambda fit: fit[0])[1]
        figures = ", ".join(f"{count:g}" for count in counts.numbers)
        weighted = any(count != round(count) for count in counts.numbers)
        own = "total weight" if weighted else "number of elements that count (tokens, mask)"
        apart = sum(counts.numbers) != counts.total
        return Finding(
            "mean-of-means",
            f"each micro-batch weighs {weighs} in the accumulated gradients, and by its share in the full "
            f"batch's: {figures} of {counts.total:g} ({counts.what}); {context.norms()}",
            f"each micro-batch's loss is divided by {counts.what}, which is {sum(counts.numbers):g} for all of them "
            f"together and {counts.total:g} for the full batch (padding counts){beside}"
            if apart
            else f"each micro-batch's loss is a mean over its own {own}, and these means are "
            f"{'averaged' if averaged else 'added up'}: what is in micro-batches with "
            f"{'a small one' if weighted else 'few of them'} weighs too much{beside}",
            f"sum the loss, and divide it by the total {'weight' if weighted else 'number of elements'} of the "
            "whole group, counted before the first micro-batch",
            evidence={"counts": counts.numbers},
        )
    weights = made_of(context.expected, context.singles, context.rtol)
    if weights is None or _alike(weights, share, context.rtol):
        return None
    figures = ", ".join(number(weight) for weight in weights)
    is_mean = abs(sum(weights) - 1.0) <= 10 * context.rtol
    return Finding(
        "mean-of-means",
        f"each micro-batch weighs {weighs} in the accumulated gradients, and {figures} in the full batch's; "
        f"{context.norms()}",
        "each micro-batch's loss is normalised by something of its own (a count of elements, a sum of weights or "
        "of class weights), and not by the whole group's; no tensor of the batch was found whose counts are these "
        f"shares{beside}"
        if is_mean
        else f"these weights add up to {number(sum(weights))} and not to 1: the loss is no mean over examples but a "
        "function of one (a root, a logarithm, a ratio), which differs for each micro-batch",
        "normalise by the total over the whole group, computed before its first micro-batch"
        if is_mean
        else "optimise the mean itself (the squared error instead of its root), or accept micro-batches as the batch "
        'size of this loss: allow=["mean-of-means"]',
        evidence={"weights": tuple(weights)},
    )


def _alike(weights: Sequence[float], share: float, rtol: float) -> bool:
    """Tell whether micro-batches weigh what they do, within tolerance: then something else differs."""
    return all(abs(weight - share) <= rtol * abs(share) for weight in weights)


def _also(share: float, parts: int, rtol: float) -> str:
    """Say what is wrong with the scale of such means besides."""
    if abs(share - 1.0) <= rtol:
        return f"; nor are these means divided by the {parts} accumulation steps"
    return f"; besides, they are divided by {number(1.0 / share)} instead of {parts}" if share > 0.0 else ""


def unequal(context: Context) -> Finding | None:
    """See micro-batches that count more than others, although each should count the same."""
    parts = context.num_parts
    if not (context.is_kept or context.is_untraced) or not context.singles:
        return None
    if not (context.is_mean or context.is_sum):
        return None
    due = 1.0 / parts if context.is_mean else 1.0
    weights = made_of(context.got, context.singles, context.rtol)
    if weights is None or all(abs(weight - due) <= LEAST_UNEQUAL * due for weight in weights):
        return None
    figures = ", ".join(number(0.0 if abs(weight) < 1e-3 * due else weight) for weight in weights)
    last_only = all(abs(weight) <= 0.01 * due for weight in weights[:-1])
    falling = all(abs(weight - (parts - place) * due) <= 0.01 * due for place, weight in enumerate(weights))
    return Finding(
        "unequal-micro-batches",
        f"the micro-batches count {figures} in the accumulated gradients, instead of {number(due)} each "
        f"({context.norms()})",
        *_unequal_cause(falling=falling, last_only=last_only),
        evidence={"weights": tuple(weights)},
    )


def _unequal_cause(*, falling: bool, last_only: bool) -> tuple[str, str]:
    if falling:
        return (
            "each backward pass runs over the sum of all losses so far, so that earlier micro-batches count again",
            "call backward() on the loss of the current micro-batch only, divided by k",
        )
    if last_only:
        return (
            "the gradients of each micro-batch replace those before, or the losses of all but the last are worth 0",
            "add the gradients of all micro-batches of a group up",
        )
    return (
        "their losses are divided by different numbers, or scaled by a factor that changes within the group",
        "divide the loss of every micro-batch by the same number: the size of its group",
    )


def coupled(context: Context) -> Finding | None:
    """See losses that couple the examples of a batch, so that no weighing of micro-batches gives the full batch's."""
    if not context.is_kept or not _is_share(context) or context.comparison.noise:
        return None
    if made_of(context.expected, [*context.singles], context.rtol) is not None or not _determined(context):
        return None
    return Finding(
        "coupled-samples",
        f"no weighing of the {context.num_parts} micro-batches' gradients gives the full batch's (norm "
        f"{number(norm(context.expected))}; accumulated {number(norm(context.got))})",
        "the loss, or a layer, couples the examples of a batch: negatives within the batch (contrastive losses), "
        "statistics or a ranking over the batch, something from elsewhere that is taken by the place in the batch, a "
        f"perturbation of the weights by the batch's own gradient{_running(context)}. More examples then mean "
        "another loss, and accumulation cannot reproduce it",
        "gather what the examples are compared with over the whole group (a memory bank, cached embeddings), or accept "
        'micro-batches as the batch size of this loss: allow=["coupled-samples"]',
    )


def _running(context: Context) -> str:
    """Name the figures beside the model that move in every micro-batch: running statistics of the data, perhaps."""
    names = moving_figures(context)[:3]
    return f", running statistics ({listed(names)} changed in every micro-batch)" if names else ""


def _share(context: Context) -> float | None:
    """Return which part of its gradients for one accumulation step each micro-batch adds; None if that differs."""
    if not context.singles:
        return None
    pairs = zip(context.increments, context.singles, strict=True)
    shares = [ratio(mine, single, context.rtol) for mine, single in pairs]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares) or max(known) - min(known) > 2 * context.rtol * abs(known[0]):
        return None
    return sum(known) / len(known)


def _is_share(context: Context) -> bool:
    """Tell whether each micro-batch adds one k-th of what a step for one accumulation step makes of it."""
    share = _share(context)
    return share is not None and abs(share * context.num_parts - 1.0) <= context.rtol


def _determined(context: Context) -> bool:
    # more elements than unknowns, and micro-batches that are not alike: else everything would fit
    return num_elements(context.expected) > 2 * context.num_parts
