"""Rules about losses: not scaled, and in low precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tl_amp._acts import (
    PARTLY,
    SCALED,
    UNSCALED,
    Passed,
    Unscaled,
    fresh,
    is_scaled,
    known_scales,
    passes,
    short,
    unscaled_terms,
    unscalings,
)
from tl_amp._words import at, quoted, scales, several, telling, together
from tl_core import Finding
from tl_telemetry import Evidence, LossTerm

_LOW = (torch.float16, torch.bfloat16)


def loss_not_scaled(run: Evidence) -> Iterator[Finding]:
    """See gradients that a scaler divides by its scale although their loss was never multiplied by it."""
    values = known_scales(run)
    known = passes(run)
    status = {number: is_scaled(passed.event, values) for number, passed in known.items()}
    updates = [u for u in unscalings(run) if u.scale != 1.0 and any(n in known for n in fresh(run, u.event))]
    none: list[Unscaled] = []
    mixed: list[Unscaled] = []
    for unscaled in updates:
        kinds = [status[n] for n in fresh(run, unscaled.event) if n in status]
        if all(kind == UNSCALED for kind in kinds):
            none.append(unscaled)
        elif any(kind in (UNSCALED, PARTLY) for kind in kinds):
            mixed.append(unscaled)
    if none:
        yield _not_scaled(run, _of(run, known, none), none, len(updates))
    if mixed:
        concerned = _of(run, known, mixed)
        plain = [passed for passed in concerned if status[passed.event.number] == UNSCALED]
        partly = [passed for passed in concerned if status[passed.event.number] == PARTLY]
        whole = [passed for passed in concerned if status[passed.event.number] == SCALED]
        yield _one_of_several(run, plain, partly, whole, mixed, len(updates))


def _of(run: Evidence, known: dict[int, Passed], updates: Iterable[Unscaled]) -> list[Passed]:
    numbers = {number for unscaled in updates for number in fresh(run, unscaled.event)}
    return [known[number] for number in sorted(numbers) if number in known]


def _not_scaled(run: Evidence, plain: list[Passed], hits: list[Unscaled], updates: int) -> Finding:
    sites = together(passed.event.site for passed in plain)
    hit = telling(unscaled.step for unscaled in hits)
    factor = scales(unscaled.scale for unscaled in hits)
    return Finding(
        rule="loss-not-scaled",
        seen=f"backward() at {sites} ran on a loss that no scale multiplies, and the GradScaler divided the gradients "
        f"of {quoted(unscaled.event.optimizer for unscaled in hits)} by {factor} all the same ({len(hits)} of "
        f"{several(updates, 'update')}, {at(hit)})",
        cause="scaler.scale() ran, and its result was not used for this backward pass, as in `scaler.scale(loss); "
        f"loss.backward()`: the gradients become {factor} times too small",
        fix=f"write scaler.scale(loss).backward() at {sites}",
        steps=hit,
        parameters=run.named({i for unscaled in hits for i in unscaled.event.graded}),
        evidence={"updates": updates, "not_scaled": len(hits)},
    )


def _one_of_several(
    run: Evidence,
    plain: list[Passed],
    partly: list[Passed],
    whole: list[Passed],
    hits: list[Unscaled],
    updates: int,
) -> Finding:
    sites = together(passed.event.site for passed in (*plain, *partly))
    hit = telling(unscaled.step for unscaled in hits)
    factor = scales(unscaled.scale for unscaled in hits)
    if partly:
        terms = [term for passed in partly for term in unscaled_terms(passed.event)]
        what = f"the sum of losses that backward() at {sites} ran on has terms that no scale multiplies"
        what += f" (made by {_made_by(terms)}), beside scaled ones"
        fix = f"scale the whole sum at {sites}: scaler.scale(first + second).backward()"
    else:
        what = f"backward() at {sites} ran on a loss that no scale multiplies"
        if whole:
            what += f", and backward() at {together(passed.event.site for passed in whole)} on a scaled one"
        fix = f"write scaler.scale(loss).backward() at {sites} too"
    return Finding(
        rule="loss-not-scaled",
        seen=f"{what}: the GradScaler divided the gradients of both by {factor} "
        f"({quoted(unscaled.event.optimizer for unscaled in hits)}, {len(hits)} of {several(updates, 'update')}, "
        f"{at(hit)})",
        cause=f"one of several losses is not scaled: its part of the gradients becomes {factor} times too small, and "
        "the other losses decide alone",
        fix=fix,
        steps=hit,
        parameters=run.named({i for passed in (*plain, *partly) for i in passed.event.filled}),
        evidence={"updates": updates, "not_scaled": len(hits)},
    )


def _made_by(terms: Iterable[LossTerm]) -> str:
    return together(term.name.removesuffix("Backward0").removesuffix("Backward") for term in terms)


def low_precision_loss(run: Evidence) -> Iterator[Finding]:
    """See losses that are float16 or bfloat16 numbers themselves."""
    hits: dict[torch.dtype, list[tuple[Passed, str]]] = {}
    for passed in passes(run).values():
        event = passed.event
        found = [(term.dtype, _made_by([term])) for term in event.terms or ()] or [(event.dtype, "")]
        for dtype, made in found:
            if dtype in _LOW and dtype is not None and event.root is not None:
                hits.setdefault(dtype, []).append((passed, made))
    for dtype, pairs in hits.items():
        concerned = {passed.event.number: passed for passed, _ in pairs}
        made = together(name for _, name in pairs if name)
        by = f" (made by {made})" if made else ""
        hit = telling(passed.step for passed in concerned.values())
        digits, more = ("3", "and they overflow beyond 65504") if dtype is torch.float16 else ("2", "")
        yield Finding(
            rule="low-precision-loss",
            seen=f"the loss that backward() at {together(p.event.site for p in concerned.values())} ran on is a "
            f"{short(dtype)} number{by} in {len(concerned)} of {several(len(run.backwards), 'backward pass')} "
            f"({at(hit)})",
            cause=f"the last operations of the loss are computed in {short(dtype)}: their sums keep about {digits} "
            f"digits{', ' + more if more else ''}",
            fix="compute the loss in float32: convert the outputs first (`loss_fn(outputs.float(), targets)`)",
            steps=hit[:3],
            evidence={"passes": len(run.backwards), "low_precision": len(concerned), "dtype": short(dtype)},
        )
