"""What a run of pytest says of verdicts: categories, sections, lines at the end, JUnit XML, GitHub."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

SOURCE = """
import pytest
from tl_pytest import Finding, Report

def report(*rules, judged=True):
    findings = tuple(Finding(rule, f"{rule} was seen\\nin two lines", "its cause", "its fix") for rule in rules)
    notes = () if judged else (Finding("not-judged", "there was nothing to see", "", ""),)
    return Report("made-up check", findings, notes, judged=judged)

def test_fails(training_runner):
    report("rule-b", "rule-a").require()

def test_fails_again(training_runner):
    report("rule-b").require()

def test_judges_nothing(training_runner):
    report(judged=False).require()

def test_passes(training_runner):
    report().require()

def test_fails_otherwise(training_runner):
    with pytest.raises(AssertionError):
        report("rule-c").require()
    assert 0

def test_expects_a_finding(training_runner):
    with pytest.raises(AssertionError):
        report("rule-d").require()

@pytest.mark.xfail
def test_is_known_to_fail(training_runner):
    report("rule-e").require()

@pytest.mark.xfail
def test_is_known_to_judge_nothing(training_runner):
    report(judged=False).require()
"""


def between(lines: list[str], start: str, end: str) -> list[str]:
    """Give the lines after the one that holds `start`, up to the next that holds `end`."""
    first = next(number for number, line in enumerate(lines) if start in line)
    last = next(number for number, line in enumerate(lines) if number > first and end in line)
    return lines[first + 1 : last]


END = [
    "NOT JUDGED test_inner.py::test_judges_nothing - made-up check",
    "tl: rule-b 2x (test_fails, test_fails_again)",
    "tl: rule-a 1x (test_fails)",
    "tl: could not judge 1x (test_judges_nothing)",
]


def test_the_end_has_a_line_for_each_rule(run_tests):
    """Rules that failed tests are counted, the most frequent first; findings that a test expects are not."""
    result = run_tests(SOURCE)
    assert between(result.outlines, "= tl-pytest =", "=====") == END


FILES = ("--junitxml=out.xml", "--tl-sarif=out.sarif", "--tl-report=out")


def written(folder: Path) -> tuple[object, ...]:
    """Give what the files of a run say of verdicts."""
    root = ElementTree.parse(folder / "out.xml").getroot()
    cases = sorted(root.iter("testcase"), key=lambda case: str(case.get("name")))
    properties = {
        case.get("name"): [(one.get("name"), one.get("value")) for one in case.iter("property")] for case in cases
    }
    lines = {path.name: path.read_text() for path in sorted((folder / "out").iterdir())}
    return properties, json.loads((folder / "out.sarif").read_text()), lines


def test_workers_report_what_one_process_does(run_tests, pytester):
    """The lines at the end, JUnit XML, SARIF and the files of the tests are the same under pytest-xdist."""
    pytest.importorskip("xdist")
    run_tests(SOURCE, *FILES)
    alone = written(pytester.path)
    result = run_tests(SOURCE, *FILES, "-n", "2", subprocess=True)
    assert written(pytester.path) == alone
    assert between(result.outlines, "= tl-pytest =", "=====")[: len(END)] == END
    assert "3 failed, 2 passed, 2 xfailed, 1 could not judge in " in result.outlines[-1]


def test_what_could_not_be_judged_is_a_category_of_its_own(run_tests):
    """It fails the run, is counted beside the failed tests, and is shown as they are."""
    result = run_tests(SOURCE, "-k", "judges_nothing")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "= 7 deselected, 1 could not judge in " in result.outlines[-1]
    assert "test_inner.py ?" in "".join(result.outlines)
    assert between(result.outlines, "= COULD NOT JUDGE =", "= tl-pytest =") == [
        f"{' test_judges_nothing ':_^120}",
        "",
        "training_runner = TrainingRunner(device='cpu', seed=0)",
        "",
        "    def test_judges_nothing(training_runner):",
        ">       report(judged=False).require()",
        "E       tl_core.NotJudged: made-up check: could not judge",
        "E       ",
        "E       Notes:",
        "E       [not-judged] there was nothing to see",
        "",
        "test_inner.py:16: NotJudged",
        f"{' tl findings ':-^120}",
        "made-up check: could not judge",
        "  [not-judged] there was nothing to see",
    ]


def test_verbose_runs_name_the_category(run_tests):
    """With -v the line of the test says it in words, and --tb=no leaves the section out."""
    result = run_tests(SOURCE, "-v", "--tb=no", "-k", "judges_nothing")
    result.stdout.fnmatch_lines(["test_inner.py::test_judges_nothing NOT JUDGED *"])
    result.stdout.no_fnmatch_line("*COULD NOT JUDGE*")


def test_a_failed_test_has_a_section_of_findings(run_tests):
    """The findings stand in a line each under the traceback."""
    result = run_tests(SOURCE, "-k", "test_fails and not again and not otherwise")
    assert between(result.outlines, "- tl findings -", "=====") == [
        "made-up check: failed",
        "  [rule-b] rule-b was seen",
        "  [rule-a] rule-a was seen",
    ]


def test_a_test_that_fails_otherwise_shows_earlier_findings(run_tests):
    """What a check found before, and the test caught, may be why it fails."""
    result = run_tests(SOURCE, "-k", "otherwise")
    assert between(result.outlines, "- tl findings -", "=====") == [
        "made-up check: failed",
        "  [rule-c] rule-c was seen",
    ]
    result.stdout.no_fnmatch_line("tl: *")


def test_a_test_without_findings_has_no_section(run_tests, loop):
    """A failed test whose run is fine, a passed one, and a run without failures say nothing of findings."""
    source = (
        loop
        + """
def test_it(training_runner):
    run = training_runner.run(make_setup, make_batch(), train_step, steps=6)
    assert run.final < 0

def test_passes(training_runner):
    training_runner.run(make_setup, make_batch(), train_step, steps=6).assert_healthy()
"""
    )
    result = run_tests(source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.no_fnmatch_line("*tl findings*")
    result.stdout.no_fnmatch_line("*= tl-pytest =*")


def test_a_plain_assertion_shows_what_the_run_has(run_tests, loop):
    """A test that fails before it asked for a verdict shows the findings of its runs, and says that it did not ask."""
    source = (
        loop.replace("setup.optimizer.zero_grad()", "pass")
        + """
def test_it(training_runner):
    run = training_runner.run(make_setup, make_batch(), train_step, steps=6)
    assert run.final < 0

def test_that_asked(training_runner):
    run = training_runner.run(make_setup, make_batch(), train_step, steps=6)
    run.assert_healthy(allow=["missing-zero-grad"])
    assert run.final < 0
"""
    )
    result = run_tests(source)
    result.assert_outcomes(failed=2)
    head, finding = between(result.outlines, "- tl findings -", "_____")
    assert head == "Training run, of which nothing was asserted: failed"
    assert finding.startswith("  [missing-zero-grad] the gradients that 'optimizer' stepped with still held those of ")
    assert sum("- tl findings -" in line for line in result.outlines) == 1


def test_a_fixture_may_ask_for_a_verdict(run_tests, pytester):
    """A verdict in a fixture, at its start or its end, is an error of the test with the same sections and lines."""
    source = (
        SOURCE[: SOURCE.index("def test_fails(")]
        + """
@pytest.fixture
def at_start(training_runner):
    report("rule-a").require()

@pytest.fixture
def at_end(training_runner):
    yield
    report("rule-b").require()

def test_start(at_start):
    pass

def test_end(at_end):
    pass
"""
    )
    result = run_tests(source, *FILES)
    result.assert_outcomes(errors=2, passed=1)
    properties = written(pytester.path)[0]
    finding = ("tl_finding", "[rule-a] rule-a was seen\nin two lines")
    assert properties["test_start"] == [finding, ("tl_verdict", "made-up check: failed")]
    lines = between(result.outlines, "= tl-pytest =", "=====")
    assert lines[:2] == ["tl: rule-a 1x (test_start)", "tl: rule-b 1x (test_end)"]
    assert sum("- tl findings -" in line for line in result.outlines) == 2


def test_junit_carries_verdicts_and_findings(run_tests, pytester):
    """Each test has its verdicts as properties, and a failed one its findings."""
    run_tests(SOURCE, *FILES)
    properties, _, _ = written(pytester.path)
    assert properties == {
        "test_fails": [
            ("tl_finding", "[rule-b] rule-b was seen\nin two lines"),
            ("tl_finding", "[rule-a] rule-a was seen\nin two lines"),
            ("tl_verdict", "made-up check: failed"),
        ],
        "test_fails_again": [
            ("tl_finding", "[rule-b] rule-b was seen\nin two lines"),
            ("tl_verdict", "made-up check: failed"),
        ],
        "test_judges_nothing": [("tl_verdict", "made-up check: could not judge")],
        "test_passes": [("tl_verdict", "made-up check: passed")],
        "test_fails_otherwise": [("tl_verdict", "made-up check: failed")],
        "test_expects_a_finding": [("tl_verdict", "made-up check: failed")],
        "test_is_known_to_fail": [("tl_verdict", "made-up check: failed")],
        "test_is_known_to_judge_nothing": [("tl_verdict", "made-up check: could not judge")],
    }


@pytest.mark.parametrize("there", ["true", "false"])
def test_github_gets_annotations(run_tests, monkeypatch, pytester, there):
    """On GitHub each finding is an annotation at the line of the test that asked; elsewhere there are none."""
    monkeypatch.setenv("GITHUB_ACTIONS", there)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path.parent))
    result = run_tests(SOURCE, "-k", "again or judges_nothing")
    file = f"{pytester.path.name}/test_inner.py"
    expected = [
        f"::error file={file},line=13,title=made-up check%3A rule-b::"
        "rule-b was seen%0Ain two lines%0Acause: its cause%0Afix: its fix",
        f"::error file={file},line=16,title=made-up check%3A not-judged::"
        "made-up check: could not judge%0Athere was nothing to see",
    ]
    shown = [line for line in result.outlines if line.startswith("::")]
    assert shown == (expected if there == "true" else [])


def test_a_test_without_the_fixtures_is_heard_too(run_tests):
    """Checks that are called by themselves report in the same way."""
    source = SOURCE.replace("(training_runner)", "()")
    assert between(run_tests(source).outlines, "= tl-pytest =", "=====") == END


def test_subtests_keep_their_categories(run_tests):
    """A verdict inside of a subtest fails it as any exception does."""
    if pytest.version_tuple < (9,):
        pytest.skip("subtests are part of pytest 9 and later")
    source = (
        SOURCE[: SOURCE.index("def test_fails(")]
        + """
def test_it(subtests):
    with subtests.test("first"):
        report(judged=False).require()
    with subtests.test("second"):
        report("rule-a").require()
"""
    )
    result = run_tests(source)
    assert "3 failed" in result.outlines[-1]
    assert "tl: rule-a 1x (test_it)" in result.outlines
