"""What a run shows of its GradScalers: attempts to update, what was scaled, and what was unscaled when."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch

from tl_telemetry import (
    Backward,
    Clip,
    Evidence,
    GradientsCleared,
    LossTerm,
    OptimizerStep,
    ScalerUpdate,
    SkippedStep,
    Unscaling,
)

# What an event's portions call content that no backward pass put there.
BY_HAND = -1

SCALED, PARTLY, UNSCALED = "scaled", "partly scaled", "unscaled"


T = TypeVar("T")


def _once(read: Callable[[Evidence], T]) -> Callable[[Evidence], T]:
    """Read something of a run's evidence once, however many rules ask for it."""
    known: weakref.WeakKeyDictionary[Evidence, T] = weakref.WeakKeyDictionary()

    @wraps(read)
    def reader(run: Evidence) -> T:
        if run not in known:
            known[run] = read(run)
        return known[run]

    return reader


class Attempt(NamedTuple):
    """One update that a scaler was asked for: applied, or skipped because of an overflow."""

    place: int  # among the run's events
    step: int
    optimizer: str
    scaler: str
    site: str
    applied: bool


class Unscaled(NamedTuple):
    """One unscaling of an optimizer's gradients."""

    place: int
    step: int
    event: Unscaling

    @property
    def scale(self) -> float:
        return math.nan if self.event.scale is None else self.event.scale.value()


class Updated(NamedTuple):
    """One ``update()`` of a scaler."""

    place: int
    step: int
    event: ScalerUpdate


class Passed(NamedTuple):
    """One backward pass."""

    place: int
    step: int
    event: Backward


class Stepped(NamedTuple):
    """One step of an optimizer."""

    place: int
    step: int
    event: OptimizerStep


@_once
def own_scalers(run: Evidence) -> set[str]:
    """Return the names of the setup's scalers that are enabled: those that are judged."""
    return {name for name, scaler in run.scalers.items() if scaler.is_enabled()} - run.stranger_scalers


@_once
def attempts(run: Evidence) -> list[Attempt]:
    """Return every update that a scaler was asked for, in order."""
    found = []
    for place, (record, event) in enumerate(run.events):
        if isinstance(event, OptimizerStep) and event.scaler is not None and _enabled(run, event.scaler):
            found.append(Attempt(place, record.step, event.optimizer, event.scaler, event.site, event.applied))
        elif isinstance(event, SkippedStep) and event.found_inf is not None and any(event.found_inf.values()):
            found.append(Attempt(place, record.step, event.optimizer, event.scaler, event.site, applied=False))
    return found


def _enabled(run: Evidence, scaler: str) -> bool:
    known = run.scalers.get(scaler)
    return known is not None and known.is_enabled()


@_once
def unscalings(run: Evidence) -> list[Unscaled]:
    """Return every unscaling by a scaler of the setup, in order."""
    own = own_scalers(run)
    return [
        Unscaled(place, record.step, event)
        for place, (record, event) in enumerate(run.events)
        if isinstance(event, Unscaling) and event.scaler in own
    ]


@_once
def scaler_updates(run: Evidence) -> list[Updated]:
    """Return every update of a scaler of the setup, in order."""
    own = own_scalers(run)
    return [
        Updated(place, record.step, event)
        for place, (record, event) in enumerate(run.events)
        if isinstance(event, ScalerUpdate) and event.scaler in own
    ]


@_once
def passes(run: Evidence) -> dict[int, Passed]:
    """Return every backward pass by its number."""
    return {
        event.number: Passed(place, record.step, event)
        for place, (record, event) in enumerate(run.events)
        if isinstance(event, Backward)
    }


@_once
def direct_steps(run: Evidence) -> list[Stepped]:
    """Return the steps that no enabled scaler called, in order."""
    return [
        Stepped(place, record.step, event)
        for place, (record, event) in enumerate(run.events)
        if isinstance(event, OptimizerStep) and (event.scaler is None or not _enabled(run, event.scaler))
    ]


def fresh(run: Evidence, event: OptimizerStep | Unscaling | Clip) -> list[int]:
    """Return the backward passes in its gradients that no earlier update of these parameters had used.

    Where somebody edited the gradients after a backward pass, what they held is still that pass's.
    """
    numbers = {number for portion in event.portions for number in portion.unused}
    edited = {i for portion in event.portions if portion.source == (BY_HAND,) for i in portion.parameters}
    if not edited:
        return sorted(numbers)
    for place in range(run.places[id(event)] - 1, -1, -1):
        earlier = run.events[place][1]
        if isinstance(earlier, Backward) and not edited.isdisjoint(earlier.filled):
            return sorted({*numbers, earlier.number})
        if isinstance(earlier, GradientsCleared) and not edited.isdisjoint(earlier.cleared):
            break
        if isinstance(earlier, (OptimizerStep, SkippedStep)) and earlier.optimizer == getattr(event, "optimizer", ""):
            break
    return sorted(numbers)


@_once
def known_scales(run: Evidence) -> set[float]:
    """Return every value that a loss scale had during the run."""
    found = {record.loss_scale for record in run.records if record.loss_scale is not None}
    found.update(scaler.get_scale() for scaler in run.scalers.values() if scaler.is_enabled())
    for _, event in run.events:
        spans: tuple[Any, ...] = ()
        if isinstance(event, ScalerUpdate):
            spans = (event.before, event.after)
        elif isinstance(event, Unscaling):
            spans = (event.scale,)
        found.update(span.value() for span in spans if span is not None)
    return found


def is_scaled(event: Backward, scales: Iterable[float]) -> str | None:
    """Tell how much of what a backward pass began at is multiplied by a loss scale: ``SCALED``, ...; None: not known.

    Args:
        event: the pass.
        scales: values of the scale; a factor that equals one of them scales too (``loss * scaler.get_scale()``).
    """
    terms = [term for term in event.terms or () if 0.0 not in factors_of(term)]
    if not terms or event.terms is None:
        return None
    given = 1.0 if event.gradient is None else event.gradient.value()
    by_hand = {scale for scale in scales if scale > 1.0}
    scaled = [
        term.scaler is not None
        or any(math.isclose(product, scale, rel_tol=1e-5) for product in _products(term, given) for scale in by_hand)
        for term in terms
    ]
    if all(scaled):
        return SCALED
    if not all(term.known for term, is_one in zip(terms, scaled, strict=True) if not is_one):
        return None
    return PARTLY if any(scaled) else UNSCALED


def unscaled_terms(event: Backward) -> list[LossTerm]:
    """Return the terms of a loss that no scaler's scale multiplies."""
    return [term for term in event.terms or () if term.scaler is None and 0.0 not in factors_of(term)]


def factors_of(term: LossTerm) -> list[float]:
    """Return what multiplies a term beside a scaler's scale."""
    return [factor if isinstance(factor, float) else factor.value() for factor in term.factors]


def _products(term: LossTerm, given: float) -> Iterator[float]:
    """Yield what may be a scale: the gradient that the pass began with, and each factor."""
    factors = factors_of(term)
    yield given
    yield from factors
    yield math.prod(factors)


def factor(term: LossTerm) -> float:
    """Return the product of what multiplies a term beside a scaler's scale."""
    return math.prod(factors_of(term))


def norms_after(event: Backward) -> dict[int, float]:
    """Return the norm of each gradient that a pass filled, by parameter."""
    if event.norms is None or len(event.norms) != len(event.filled):
        return {}
    return dict(zip(event.filled, event.norms.values(), strict=True))


def norms_at(unscaled: Unscaled) -> list[float]:
    """Return the norms of the gradients that were unscaled, before that; not known late in a long run."""
    norms = unscaled.event.norms
    return [] if norms is None else norms.values()


def total(norms: Iterable[float]) -> float:
    """Return the L2 norm of the whole from the L2 norms of its parts."""
    return math.hypot(*norms)


def short(dtype: torch.dtype | None) -> str:
    """Return a dtype's name: ``float16``."""
    return str(dtype).removeprefix("torch.")
