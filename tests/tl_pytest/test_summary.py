"""Verdicts as plain data, and what is made of them without pytest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import tl_core
from tl_pytest._summary import Failure, Summary
from tl_pytest._verdicts import describe, listening, plain


def failure(test: str, *rules: str, file: str = "t.py", line: int = 1) -> Failure:
    findings = tuple(tl_core.Finding(rule, "50% seen,\nor: more", "", "") for rule in rules)
    verdict = describe(tl_core.Report("check", findings, judged=bool(rules)))
    return Failure(f"{file}::{test}", test, file, line, verdict)


def test_lines_by_rule_are_sorted_and_short():
    """The most frequent rule is first, a test is named once, and of many tests five are named."""
    summary = Summary()
    for number in (7, 1, 2, 3, 4, 5, 6):
        summary.add(failure(f"test_{number}", "rule-b", line=number))
    summary.add(failure("test_1", "rule-a", "rule-a", file="a.py"))
    summary.add(failure("test_2", "rule-c", "rule-0", file="a.py"))
    assert summary.rule_lines() == [
        "tl: rule-b 7x (test_1, test_2, test_3, test_4, test_5, and 2 more)",
        "tl: rule-a 2x (test_1)",
        "tl: rule-0 1x (test_2)",
        "tl: rule-c 1x (test_2)",
    ]
    assert Summary().rule_lines() == []


def test_annotations_escape_what_github_reads(monkeypatch):
    """Per cent signs and line ends are escaped in texts, commas and colons in places too."""
    summary = Summary()
    summary.add(failure("test_1", "rule-a", file="a,b/t.py", line=3))
    text = "50%25 seen,%0Aor: more"
    for workspace, file in (("/there", "repo/a%2Cb/t.py"), ("/other", "a%2Cb/t.py"), ("", "a%2Cb/t.py")):
        monkeypatch.setenv("GITHUB_WORKSPACE", workspace)
        expected = f"::error file={file},line=3,title=check%3A rule-a::{text}"
        assert summary.annotations(Path("/there/repo")) == [expected]


def test_evidence_is_made_plain():
    """Numbers, texts and containers stay; what JSON lacks becomes text."""
    given = {"a": (1, 2.5, math.nan, -math.inf), 3: {"x"}, "t": torch.tensor(1.5), "n": None, "b": True}
    assert plain(given) == {
        "a": [1, 2.5, "nan", "-inf"],
        "3": ["x"],
        "t": "tensor(1.5000)",
        "n": None,
        "b": True,
    }
    assert plain(b"x" * 2000) == "b'" + "x" * 998


def test_a_report_has_one_of_three_verdicts():
    """Findings make it failed; without them it passed, or nothing could be judged."""
    finding = tl_core.Finding("rule", "seen", "cause", "fix")
    verdicts = [
        describe(tl_core.Report("check", findings, judged=judged))["verdict"]
        for findings, judged in (((), True), ((finding,), True), ((finding,), False), ((), False))
    ]
    assert verdicts == ["passed", "failed", "failed", "could not judge"]


def test_listening_hears_each_report_and_ends():
    """Reports are heard before they raise, by every listener of nested ones, and not after the block."""
    outer: list[tl_core.Report] = []
    inner: list[tl_core.Report] = []
    before = tl_core.Report.require
    good, bad = tl_core.Report("good"), tl_core.Report("bad", judged=False)
    with listening(outer.append):
        assert good.require() is good
        with pytest.raises(tl_core.NotJudged), listening(inner.append):
            bad.require()
    assert tl_core.Report.require is before
    good.require()
    assert (outer, inner) == ([good, bad], [bad])
