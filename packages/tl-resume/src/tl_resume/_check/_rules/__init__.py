"""The rules of the resume check: functions of the evidence, which give findings or notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tl_core import Finding
from tl_resume._check._evidence import Evidence
from tl_resume._check._rule_ids import RESUME_FINDINGS
from tl_resume._check._rules import data, hidden, pieces, saving, steps, undecided

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    saving.changes_training,
    pieces.order_varies,
    pieces.optimizer_left_behind,
    pieces.not_restored,
    data.generators,
    data.position,
    hidden.attributes,
    hidden.outside,
    steps.not_restored,
    steps.fresh_process,
)


def findings(evidence: Evidence) -> list[Finding]:
    """Return what is wrong: established causes first, then the order of the rule ids."""
    rank = {rule: index for index, rule in enumerate(RESUME_FINDINGS)}
    found = [finding for rule in RULES for finding in rule(evidence)]
    found.sort(key=lambda f: (not f.evidence.get("is_cause", False), rank[f.rule]))
    first = next((f for f in found if f.evidence.get("is_cause")), None)
    found = [f if f is first else _effect_left_out(f) for f in found]
    return found if first is not None else [*found, *undecided.diverges(evidence)]


def _effect_left_out(finding: Finding) -> Finding:
    """Leave out how the runs part, which the first finding has said for all pieces of the cause."""
    if not finding.evidence.get("is_cause"):
        return finding
    return replace(finding, seen=finding.seen.removesuffix(str(finding.evidence.get("effect", ""))))


def notes(evidence: Evidence) -> list[Finding]:
    """Return what is worth knowing."""
    rules = (undecided.noise, undecided.untried, hidden.unsaved, undecided.uncopied)
    return [note for rule in rules for note in rule(evidence)]
