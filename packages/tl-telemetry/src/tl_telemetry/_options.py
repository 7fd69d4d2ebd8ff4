"""What a person may say about a run when it is judged."""

from __future__ import annotations

import difflib
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
