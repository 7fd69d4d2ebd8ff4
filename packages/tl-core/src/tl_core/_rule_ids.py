"""The ids of rules that a person may allow or demand."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def check_rule_ids(given: object, argument: str, known: Iterable[str]) -> frozenset[str]:
    """Check a collection of rule ids, such as the one given for ``allow=``.

    Args:
        given: What the person gave.
        argument: The argument's name, for messages.
        known: All ids that there are, in the order in which a message lists them.

    Returns:
        The ids.

    Raises:
        TypeError: It is a plain string or no collection, or holds something that is no string.
        ValueError: There is no such rule; the message lists the nearest ones, or all.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        hint = f": write [{given!r}]" if isinstance(given, str) else ""
        raise TypeError(f"{argument} must be a list of rule ids, got {given!r}{hint}")
    known = tuple(known)
    rules = tuple(given)
    for rule in rules:
        if not isinstance(rule, str):
            raise TypeError(f"{argument} must hold rule ids (strings), got {rule!r}")
        if rule not in known:
            near = difflib.get_close_matches(rule, known, n=3)
            there = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{argument} names the rule {rule!r}, which does not exist; {there}")
    return frozenset(rules)
