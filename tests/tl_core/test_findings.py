from __future__ import annotations

import copy
import pickle

import pytest

from tl_core import CheckFailed, Finding, NotJudged, Report

LATE = Finding("late-step", "the step came late\nin group 1", "it was\nput last", "put it first", steps=(3,))
NOTE = Finding("odd-thing", "something is odd", "", "")


def test_a_finding_reads_as_rule_cause_and_fix():
    """The rule stands in brackets, cause and fix on lines of their own, further lines indented."""
    assert str(LATE) == (
        "[late-step] the step came late\n    in group 1\n  cause: it was\n    put last\n  fix: put it first"
    )


def test_a_finding_without_cause_and_fix_is_one_line():
    """Empty parts are left out."""
    assert str(NOTE) == "[odd-thing] something is odd"


def test_findings_are_values():
    """Findings with equal content are equal, hash alike and cannot be changed."""
    assert copy.deepcopy(LATE) == LATE
    assert len({LATE, copy.deepcopy(LATE)}) == 1
    with pytest.raises(AttributeError):
        LATE.rule = "other"


@pytest.mark.parametrize(
    ("report", "verdict", "ok"),
    [
        (Report("Order"), "Order: passed", True),
        (Report("Order", notes=(NOTE,)), "Order: passed, 1 note", True),
        (Report("Order", notes=(NOTE, NOTE)), "Order: passed, 2 notes", True),
        (Report("Order", (LATE,)), "Order: failed, 1 finding", False),
        (Report("Order", (LATE, LATE), (NOTE,)), "Order: failed, 2 findings", False),
        (Report("Order", notes=(NOTE,), judged=False), "Order: could not judge", False),
        (Report("Order", (LATE,), judged=False), "Order: failed, 1 finding", False),
    ],
)
def test_the_first_line_is_the_verdict(report, verdict, ok):
    """A report passes, fails or could not judge; a finding fails it whatever else is."""
    assert str(report).splitlines()[0] == verdict
    assert report.ok is ok


def test_a_report_is_written_in_blocks():
    """Findings, then notes, then the detail, parted by blank lines."""
    report = Report("Order", (LATE, LATE), (NOTE, NOTE), "step  loss\n0     1.5")
    assert str(report).split("\n\n") == [
        "Order: failed, 2 findings",
        str(LATE),
        str(LATE),
        "Notes:\n[odd-thing] something is odd",
        "[odd-thing] something is odd",
        "step  loss\n0     1.5",
    ]


def test_a_good_report_is_returned():
    """require() hands the report on when all is well, notes or not."""
    report = Report("Order", notes=(NOTE,))
    assert report.require() is report


def test_a_failed_report_is_raised():
    """require() raises an AssertionError that carries the report and reads like it."""
    report = Report("Order", (LATE,))
    with pytest.raises(CheckFailed) as caught:
        report.require()
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report is report
    assert caught.value.findings == (LATE,)
    assert str(caught.value) == str(report)


def test_an_unjudged_report_is_raised_as_such():
    """Nothing judged is no pass: require() raises NotJudged, which is no CheckFailed."""
    report = Report("Order", judged=False)
    with pytest.raises(NotJudged) as caught:
        report.require()
    assert isinstance(caught.value, AssertionError)
    assert not isinstance(caught.value, CheckFailed)
    assert caught.value.report is report


@pytest.mark.parametrize("error", [CheckFailed, NotJudged])
def test_the_errors_can_be_pickled(error):
    """Test runners send errors between processes."""
    again = pickle.loads(pickle.dumps(error(Report("Order", (LATE,)))))
    assert type(again) is error
    assert again.report == Report("Order", (LATE,))
    assert error.__module__ == "tl_core"
