"""Verdicts as plain data, which pytest-xdist hands from its workers to the process that reports; knows no pytest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tl_pytest._unjudged import NOT_JUDGED

if TYPE_CHECKING:
    from tl_core import Finding, Report

PASSED, FAILED = "passed", "failed"
MAX_TEXT = 1000  # characters of a piece of evidence that is no number

Plain = dict[str, Any]


def describe(report: Report) -> Plain:
    """Turn a report into plain data.

    Args:
        report: The report of a check.

    Returns:
        ``check``, ``verdict`` ("passed", "failed" or "could not judge"), ``findings`` and ``notes``.
    """
    verdict = FAILED if report.findings else PASSED if report.judged else NOT_JUDGED
    return {
        "check": report.check,
        "verdict": verdict,
        "findings": [_describe_finding(one) for one in report.findings],
        "notes": [_describe_finding(one) for one in report.notes],
    }


def _describe_finding(finding: Finding) -> Plain:
    return {
        "rule": finding.rule,
        "seen": finding.seen,
        "cause": finding.cause,
        "fix": finding.fix,
        "steps": [int(step) for step in finding.steps],
        "parameters": [str(name) for name in finding.parameters],
        "evidence": plain(finding.evidence),
    }


def plain(value: object) -> Any:
    """Turn evidence into what JSON and pytest-xdist can carry; numbers that JSON lacks become texts (``"nan"``)."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    return str(value)[:MAX_TEXT]


def message(finding: Plain) -> str:
    """Say what was seen, the cause and the fix, each on a line of its own."""
    lines = [finding["seen"], *(f"{name}: {finding[name]}" for name in ("cause", "fix") if finding[name])]
    return "\n".join(lines)


def brief(verdicts: Iterable[Plain]) -> list[str]:
    """Give the findings of verdicts in a line each, under a line for each check that did not pass."""
    lines = []
    for verdict in verdicts:
        if verdict["verdict"] == PASSED:
            continue
        lines.append(f"{verdict['check']}: {verdict['verdict']}")
        shown = verdict["findings"] or verdict["notes"]
        lines += [f"  [{one['rule']}] {_first_line(one['seen'])}" for one in shown]
    return lines


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


@contextmanager
def listening(heard: Callable[[Report], None]) -> Iterator[None]:
    """Hear of each report that must be without findings; every assertion of every check asks its report that.

    Args:
        heard: Called with the report, before it raises.
    """
    from tl_core import Report

    asked = Report.require

    def require(self: Report) -> Report:
        heard(self)
        return asked(self)

    setattr(Report, "require", require)  # noqa: B010  a type checker objects to the assignment
    try:
        yield
    finally:
        setattr(Report, "require", asked)  # noqa: B010  (as above)
