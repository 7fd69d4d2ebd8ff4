"""How a verdict travels on pytest's reports; imported in every run, so that it imports next to nothing."""

from __future__ import annotations

import pytest

ATTRIBUTE = "tl_verdict"  # of a report; pytest-xdist hands on all attributes that are plain data
FINDING, VERDICT = PROPERTIES = ("tl_finding", "tl_verdict")  # of a test, in JUnit XML
NOT_JUDGED = "could not judge"


def is_unjudged(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Tell whether nothing could be judged in a test that failed by that."""
    # the reports of subtests have categories of their own
    if type(report) is not pytest.TestReport or report.when != "call":
        return False
    verdict: dict[str, object] = getattr(report, ATTRIBUTE, {})
    return verdict.get("verdict") == NOT_JUDGED
