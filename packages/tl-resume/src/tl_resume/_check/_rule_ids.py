"""The ids of the rules of tl-resume's checks; docs/rules.md has an entry for each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# In the order in which findings are shown: what other findings may follow from comes first.
RESUME_FINDINGS = (
    "saving-changes-training",
    "parameter-order-varies",
    "optimizer-of-other-model",
    "checkpoint-by-reference",
    "other-weights-loaded",
    "restored-then-overwritten",
    "loaded-in-lower-precision",
    "model-not-restored",
    "optimizer-state-misplaced",
    "optimizer-state-not-restored",
    "param-groups-not-restored",
    "scheduler-not-restored",
    "scaler-not-restored",
    "state-not-restored",
    "trainable-not-restored",
    "gradients-not-restored",
    "modes-not-restored",
    "rng-not-restored",
    "generator-not-restored",
    "data-position-not-restored",
    "attribute-not-restored",
    "outside-state-not-restored",
    "step-not-restored",
    "fresh-process-differs",
    "resume-diverges",
)
RESUME_NOTES = ("unsaved-attribute", "resume-moved", "not-repeatable", "not-copied", "not-judged")


def allowed(given: object, known: Iterable[str]) -> frozenset[str]:
    """Check the rule ids of ``allow=``.

    Raises:
        TypeError: it is a plain string, or holds something that is no string.
        ValueError: there is no such rule; the message lists the nearest ones, or all.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        hint = f": write [{given!r}]" if isinstance(given, str) else ""
        raise TypeError(f"allow must be a list of rule ids, got {given!r}{hint}")
    known = tuple(known)
    rules = tuple(given)
    for rule in rules:
        if not isinstance(rule, str):
            raise TypeError(f"allow must hold rule ids (strings), got {rule!r}")
        if rule not in known:
            near = difflib.get_close_matches(rule, known, n=3)
            there = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"allow names the rule {rule!r}, which does not exist; {there}")
    return frozenset(rules)
