"""What a check says: findings, reports, and the two errors that carry a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

R = TypeVar("R", bound="Report")


@dataclass(frozen=True)
class Finding:
    """Describe one violation of a rule (or, among a report's notes, one thing worth knowing).

    ``str(finding)`` is the rule and what was seen, then the cause and the fix, each on an indented line of its own;
    an empty cause or fix is left out. ``steps`` is not printed: ``seen`` says it in its own words.

    Args:
        rule: The rule's id, such as ``"missing-zero-grad"``.
        seen: What was seen, with numbers and names.
        cause: The established cause; worded as undecided, the candidates that the evidence leaves open.
        fix: The change to make.
        steps: The telling steps, around which a table is shown.
        parameters: Names of the parameters concerned.
        evidence: The numbers behind ``seen``, for programs.
    """

    rule: str
    seen: str
    cause: str
    fix: str
    steps: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    evidence: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        lines = [f"[{self.rule}] {_indent(self.seen)}"]
        lines += [f"  {name}: {_indent(text)}" for name, text in (("cause", self.cause), ("fix", self.fix)) if text]
        return "\n".join(lines)


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")


@dataclass
class Report:
    """Hold the verdict of one check: pass, fail, or could not judge.

    Args:
        check: The check's name, such as ``"Optimizer coverage"``.
        findings: Violations; any makes the report fail.
        notes: What is worth knowing and may be meant; never a failure.
        detail: Text (a table) shown at the end.
        judged: False when nothing could be judged, so that an empty report does not pass.
    """

    check: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    detail: str = ""
    judged: bool = True

    @property
    def ok(self) -> bool:
        """Whether the check was judged and found nothing."""
        return self.judged and not self.findings

    def require(self: R) -> R:
        """Return the report when all is well.

        Raises:
            CheckFailed: There are findings.
            NotJudged: There are none, but nothing could be judged.
        """
        if self.findings:
            raise CheckFailed(self)
        if not self.judged:
            raise NotJudged(self)
        return self

    def __str__(self) -> str:
        if self.findings:
            verdict = f"failed, {_count(len(self.findings), 'finding')}"
        elif not self.judged:
            verdict = "could not judge"
        else:
            verdict = "passed" + (f", {_count(len(self.notes), 'note')}" if self.notes else "")
        blocks = [f"{self.check}: {verdict}", *map(str, self.findings)]
        if self.notes:
            blocks.append("Notes:\n" + "\n\n".join(map(str, self.notes)))
        if self.detail:
            blocks.append(self.detail)
        return "\n\n".join(blocks)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


class _ReportError(AssertionError):
    def __init__(self, report: Report) -> None:
        # The report itself is the only argument, so that the error can be pickled (pytest-xdist sends errors around).
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)


class CheckFailed(_ReportError):  # noqa: N818  the name says what happened, as pytest's outcomes do
    """Raised when a check has findings; ``.report`` is the whole report, ``.findings`` its findings."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The report's findings."""
        return self.report.findings


class NotJudged(_ReportError):  # noqa: N818  (as above)
    """Raised when a check could judge nothing; ``.report`` says why."""


for _public in (Finding, Report, CheckFailed, NotJudged):
    _public.__module__ = "tl_core"
