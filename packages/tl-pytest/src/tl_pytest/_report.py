"""Ties verdicts to pytest's reports, and shows them at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tl_pytest._log import TestLog
from tl_pytest._settings import Settings
from tl_pytest._summary import Failure, Summary
from tl_pytest._unjudged import ATTRIBUTE, FINDING, NOT_JUDGED, VERDICT, is_unjudged
from tl_pytest._verdicts import Plain, brief, describe

SECTION = "tl findings"


def attach_verdicts(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, log: TestLog) -> None:
    """Attach what the checks said to the report of a test's phase.

    The verdict that failed the phase becomes an attribute, for the summary at the end; the findings become a section,
    and properties, which JUnit XML carries.

    Args:
        item: The test.
        call: The phase.
        report: The phase's report.
        log: What was heard in the test.
    """
    if report.failed and call.excinfo is not None:
        from tl_core import CheckFailed, NotJudged

        error = call.excinfo.value
        unasked: list[Plain] = []
        if isinstance(error, (CheckFailed, NotJudged)):
            raised = describe(error.report)
            setattr(report, ATTRIBUTE, {**raised, "line": _line(item, call.excinfo)})
            properties: list[tuple[str, object]] = [
                (FINDING, f"[{one['rule']}] {one['seen']}") for one in raised["findings"]
            ]
            item.user_properties += properties
            report.user_properties += properties
            if raised not in log.verdicts:  # raised by hand, or by a fixture that failed for an earlier test
                log.verdicts.append(raised)
        else:
            unasked = log.unasked()
        if lines := brief([*log.verdicts, *unasked]):
            report.sections.append((SECTION, "\n".join(lines)))
    if report.when == "call" or (report.when == "setup" and report.failed):
        said = dict.fromkeys(f"{one['check']}: {one['verdict']}" for one in log.verdicts)
        spoken: list[tuple[str, object]] = [(VERDICT, one) for one in said]
        item.user_properties += spoken
        report.user_properties += spoken
    _take_outcome(report, log)


def _take_outcome(report: pytest.TestReport, log: TestLog) -> None:
    if report.failed and report.when != "call":
        log.outcome = "error"
    elif report.failed:
        log.outcome = NOT_JUDGED if is_unjudged(report) else "failed"
    elif report.skipped:
        log.outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"


def _line(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> int:
    """Find the last line of the test's own file that led to the exception, else the test's first, counted from 1."""
    own = [entry.lineno + 1 for entry in excinfo.traceback if Path(entry.path) == item.path]
    return own[-1] if own else (item.location[1] or 0) + 1


def failure_of(report: pytest.TestReport) -> Failure:
    """Return the verdict that failed a phase of a test, with its place."""
    verdict: Plain = getattr(report, ATTRIBUTE)
    file, _, test = report.location
    return Failure(report.nodeid, test, Path(file).as_posix(), verdict["line"], verdict)


def show_summary(terminal: pytest.TerminalReporter, summary: Summary, settings: Settings) -> None:
    """Show what could not be judged, a line for each rule, and where reports were written.

    Args:
        terminal: pytest's terminal.
        summary: The failures of the run.
        settings: The plugin's settings.
    """
    terminal.summary_failures_combined(NOT_JUDGED, "COULD NOT JUDGE", style=terminal.config.option.tbstyle)
    lines = [f"NOT JUDGED {one.nodeid} - {one.verdict['check']}" for one in summary.failures if not one.judged]
    lines += summary.rule_lines()
    if settings.sarif is not None:
        lines.append(f"tl: findings as SARIF: {settings.sarif}")
    if settings.report is not None:
        lines.append(f"tl: verdicts and records: {settings.report}")
    if not lines:
        return
    terminal.write_sep("=", "tl-pytest")
    for line in lines:
        terminal.write_line(line)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in summary.annotations(terminal.config.rootpath):
            terminal.write_line(line)
