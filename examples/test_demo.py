"""The demo runs where there is no terminal, and its exit status says whether every bug got its finding."""

from __future__ import annotations

import dataclasses
import sys

import demo
import one_line_bugs
import pytest


@pytest.fixture
def run_demo(monkeypatch, capsys):
    def run(*bugs):
        monkeypatch.setattr(sys, "argv", ["demo"])
        monkeypatch.setattr(one_line_bugs, "BUGS", bugs)
        status = demo.main()
        return status, capsys.readouterr().out

    return run


def bug_of(rule):
    return next(bug for bug in one_line_bugs.BUGS if bug.rule == rule)


def test_the_demo_shows_the_verdict_and_each_bug_with_its_finding(run_demo):
    """The healthy loop passes, and a bug is shown as a difference of the loop with its finding below."""
    status, out = run_demo(bug_of("clip-after-step"))
    assert status == 0
    assert "\nTraining run: passed\n" in out
    difference = (
        " 1  clip after the step\n"
        "    + setup.optimizer.step()\n"
        "      nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)\n"
        "    - setup.optimizer.step()\n"
        "    [clip-after-step] clip_grad_norm_() at digits_loop.py:"
    )
    assert difference in out
    assert "1 of 1 bugs got the finding that they should" in out


def test_the_demo_fails_when_a_bug_gets_another_finding(run_demo):
    """A bug whose finding is not the expected one is named, and the exit status is 1."""
    status, out = run_demo(dataclasses.replace(bug_of("clip-after-step"), rule="clip-misses"))
    assert status == 1
    assert "    expected: clip-misses\n" in out
    assert "0 of 1 bugs got the finding that they should" in out
