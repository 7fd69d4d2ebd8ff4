"""What a person may say about a run when it is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tl_core import check_rule_ids
from tl_telemetry._rule_ids import RULES


@dataclass(frozen=True, slots=True)
class Options:
    """The bounds and permissions of one judgement; ``TrainingRun.assert_healthy`` documents them."""

    max_grad_norm: float | None = None
    min_relative_decrease: float | None = None
    every: int | None = None
    max_skipped: int = 0
    frozen: Sequence[str] = ()
    ignore: Sequence[str] = ()
    allow: frozenset[str] = field(default_factory=frozenset)
    strict: frozenset[str] = field(default_factory=frozenset)
    num_updates: Mapping[str, int] = field(default_factory=dict)


def rule_ids(given: object, argument: str) -> frozenset[str]:
    """Check ids of this package's rules."""
    return check_rule_ids(given, argument, sorted(RULES))


def as_positive(value: float | None, argument: str, *, needed: bool = False) -> float | None:
    """Check a number that is greater than 0; None is allowed unless one is needed."""
    checked = as_number(value, argument, needed=needed)
    if checked is not None and not checked > 0:
        raise ValueError(f"{argument} must be positive, got {value!r}")
    return checked


def as_number(value: float | None, argument: str, *, needed: bool = False) -> float | None:
    """Check a number; None is allowed unless one is needed."""
    if value is None and not needed:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number{'' if needed else ' or None'}, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{argument} must not be NaN")
    return float(value)


def as_count(value: int, argument: str, *, least: int) -> int:
    """Check a whole number that has a lower bound."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")
    return value


def as_update_counts(value: object, argument: str, optimizers: Iterable[str]) -> dict[str, int]:
    """Check a number of updates for every optimizer, or numbers by optimizer name."""
    optimizers = list(optimizers)
    counts: dict[str, Any] = value if isinstance(value, dict) else dict.fromkeys(optimizers, value)
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) for n in counts.values()):
        raise TypeError(f"{argument} must be an int or a dict of ints by optimizer name, got {value!r}")
    unknown = sorted(set(counts) - set(optimizers))
    if unknown:
        raise ValueError(f"{argument} names {unknown}, the setup's optimizers are {optimizers}")
    return counts


def as_patterns(value: Sequence[str], argument: str) -> tuple[str, ...]:
    """Check a list of patterns; whether each matches something is seen when the run is judged."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        hint = f": write [{value!r}]" if isinstance(value, str) else ""
        raise TypeError(f"{argument} must be a list of patterns, got {value!r}{hint}")
    return tuple(value)
