"""What a person may say about a run when it is judged."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


def rule_ids(given: object, argument: str) -> frozenset[str]:
    """Check a collection of rule ids.

    Raises:
        TypeError: it is a plain string, or holds something that is no string.
        ValueError: there is no such rule; the message lists the nearest ones, or all.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        hint = f": write [{given!r}]" if isinstance(given, str) else ""
        raise TypeError(f"{argument} must be a list of rule ids, got {given!r}{hint}")
    given = tuple(given)
    for rule in given:
        if not isinstance(rule, str):
            raise TypeError(f"{argument} must hold rule ids (strings), got {rule!r}")
        if rule not in RULES:
            near = difflib.get_close_matches(rule, RULES, n=3)
            known = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(RULES))}"
            raise ValueError(f"{argument} names the rule {rule!r}, which does not exist; {known}")
    return frozenset(given)


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


def as_patterns(value: Sequence[str], argument: str) -> tuple[str, ...]:
    """Check a list of patterns; whether each matches something is seen when the run is judged."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        hint = f": write [{value!r}]" if isinstance(value, str) else ""
        raise TypeError(f"{argument} must be a list of patterns, got {value!r}{hint}")
    return tuple(value)
