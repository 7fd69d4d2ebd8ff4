"""--tl-report DIR and --tl-sarif FILE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tl_pytest._log import TestLog, file_name

LOOPS = """
import pytest
from tl_pytest import NotJudged

def test_it(training_runner):
    run = training_runner.run(make_setup, make_batch(), train_step, steps=6)
    run.assert_finite().assert_healthy()

def test_observes(training_runner):
    setup = make_setup()
    with training_runner.observe(setup) as run:
        for _ in range(3):
            train_step(setup, make_batch())

def test_resumes(training_runner):
    training_runner.assert_resume_equivalent(make_setup, make_batch(), train_step)

def test_judges_nothing(training_runner):
    setup = make_setup()
    with training_runner.observe(setup) as run:
        pass
    run.assert_healthy()

def test_trains_nothing(torch_seed):
    pass

@pytest.mark.skip
def test_skipped(training_runner):
    pass
"""


def read(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Read the files of a folder, by the name of their test."""
    found = {}
    for path in folder.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert path.name == file_name(lines[0]["nodeid"])
        found[lines[0]["test"]] = lines
    return found


@pytest.mark.parametrize("arguments", [(), ("-p", "no:xdist")], ids=["plain", "no xdist"])
def test_each_test_has_a_file(run_tests, pytester, loop, arguments):
    """A test's file has its outcome, its verdicts with findings and notes, and its runs with a line for each step."""
    source = loop.replace("setup.optimizer.zero_grad()", "pass") + LOOPS
    result = run_tests(source, "--tl-report=some/where", "--tl-seed=3", *arguments)
    assert f"tl: verdicts and records: {pytester.path / 'some/where'}" in result.outlines
    found = read(pytester.path / "some" / "where")
    assert sorted(found) == ["test_it", "test_judges_nothing", "test_observes", "test_resumes"]
    kinds = {test: [line["kind"] for line in lines] for test, lines in found.items()}
    assert kinds["test_it"] == ["test", "verdict", "verdict", "finding", "run", *["step"] * 6]
    head, finite, healthy, finding, run, *steps = found["test_it"]
    line = source.strip().splitlines().index("def test_it(training_runner):") + 1
    assert head == {
        "kind": "test",
        "nodeid": "test_inner.py::test_it",
        "file": "test_inner.py",
        "line": line,
        "test": "test_it",
        "device": "cpu",
        "seed": 3,
        "outcome": "failed",
    }
    assert finite == {"kind": "verdict", "verdict": 0, "check": "Training run", "outcome": "passed"}
    assert healthy == {"kind": "verdict", "verdict": 1, "check": "Training run", "outcome": "failed"}
    assert (finding["verdict"], finding["rule"], finding["steps"]) == (1, "missing-zero-grad", [1, 2, 3, 4, 5])
    assert finding["evidence"]
    assert (run["run"], run["steps"]) == (0, 6)
    assert [(step["run"], step["step"]) for step in steps] == [(0, number) for number in range(6)]
    assert steps[0]["parameters"]["weight"]["grad_norm"] > 0
    assert kinds["test_observes"] == ["test", "run", "step", "step", "step"]
    assert [line["kind"] for line in found["test_resumes"] if line["kind"] != "note"] == ["test", "verdict"]
    assert found["test_judges_nothing"][0]["outcome"] == "could not judge"
    assert found["test_judges_nothing"][1]["outcome"] == "could not judge"


def test_a_verdict_that_is_raised_by_hand_is_taken_down(run_tests, pytester):
    """A verdict that no report was asked for, and that of a fixture which failed for an earlier test, are reported."""
    source = """
import pytest
from tl_pytest import NotJudged, Report

@pytest.fixture(scope="module")
def shared():
    Report("in a fixture", judged=False).require()

def test_first(shared):
    pass

def test_second(shared):
    pass

def test_by_hand():
    raise NotJudged(Report("by hand", judged=False))
"""
    result = run_tests(source, "--tl-report=out")
    assert "tl: could not judge 3x (test_first, test_second, test_by_hand)" in result.outlines
    found = read(pytester.path / "out")
    verdicts = {test: [(line["check"], line["outcome"]) for line in lines[1:]] for test, lines in found.items()}
    assert verdicts == {
        "test_first": [("in a fixture", "could not judge")],
        "test_second": [("in a fixture", "could not judge")],
        "test_by_hand": [("by hand", "could not judge")],
    }


def test_a_file_is_gone_when_its_test_has_nothing_to_tell(run_tests, pytester, loop):
    """The verdicts of an earlier run are not taken for those of this one."""
    run = "\ndef test_it(training_runner):\n    training_runner.run(make_setup, make_batch(), train_step)\n"
    run_tests(loop + run, "--tl-report=out")
    assert list(read(pytester.path / "out")) == ["test_it"]
    run_tests(loop + "\ndef test_it(training_runner):\n    pass\n", "--tl-report=out")
    assert list(read(pytester.path / "out")) == []


def test_the_twin_in_the_file_is_relative_to_the_root(run_tests, pytester, monkeypatch):
    """tl_report and tl_sarif are relative to the root, the options to where pytest was started."""
    pytester.makeini("[pytest]\ntl_report = reports\ntl_sarif = reports/out.sarif\n")
    pytester.makepyfile(test_inner="def test_it():\n    pass\n")
    inner = pytester.mkdir("inner")
    monkeypatch.chdir(inner)
    arguments = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "../test_inner.py")
    pytester.runpytest_inprocess(*arguments).assert_outcomes(passed=1)
    options = ("--tl-report=mine", "--tl-sarif=mine/out.sarif")
    pytester.runpytest_inprocess(*arguments, *options).assert_outcomes(passed=1)
    assert [path.name for path in (pytester.path / "reports").iterdir()] == ["out.sarif"]
    assert [path.name for path in (inner / "mine").iterdir()] == ["out.sarif"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--tl-report=file", "cannot make {path} (File exists); allowed: a folder, which is made where it is missing"),
        ("--tl-report=", "cannot write to ''; allowed: a folder, which is made where it is missing"),
        ("--tl-sarif=folder", "cannot write to 'folder'; allowed: a file, whose folder is made where it is missing"),
        ("--tl-sarif=", "cannot write to ''; allowed: a file, whose folder is made where it is missing"),
        (
            "--tl-sarif=file/out.sarif",
            "cannot make {path} (File exists); allowed: a file, whose folder is made where it is missing",
        ),
    ],
)
def test_places_that_cannot_be_written_to(run_tests, pytester, option, message):
    """A path that cannot be written to stops the run before it begins."""
    pytester.mkdir("folder")
    (pytester.path / "file").touch()
    result = run_tests("def test_it():\n    pass\n", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    path = pytester.path / "file"
    assert result.errlines[0] == f"ERROR: {option.partition('=')[0]}: {message.format(path=path)}"


SARIF = """
from tl_pytest import Finding, Report

def test_fails():
    finding = Finding("rule-a", "seen", "cause", "fix", (1, 2), ("weight",), {"norm": float("nan")})
    Report("made-up check", (finding,)).require()

def test_judges_nothing():
    Report("made-up check", notes=(Finding("not-judged", "nothing to see", "", ""),), judged=False).require()

def test_passes():
    Report("made-up check").require()
"""


def test_sarif_has_the_findings(run_tests, pytester):
    """Each finding is a result with its rule, its message and the line that asked; what was not judged is open."""
    result = run_tests(SARIF, "--tl-sarif=out.sarif")
    assert f"tl: findings as SARIF: {pytester.path / 'out.sarif'}" in result.outlines
    log = json.loads((pytester.path / "out.sarif").read_text())
    (run,) = log["runs"]
    assert (log["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "tl-pytest")
    assert run["tool"]["driver"]["rules"] == [{"id": "not-judged"}, {"id": "rule-a"}]
    assert run["originalUriBaseIds"] == {"%SRCROOT%": {"uri": f"{pytester.path.as_uri()}/"}}

    def location(line: int, test: str) -> dict[str, object]:
        file = {"uri": "test_inner.py", "uriBaseId": "%SRCROOT%"}
        return {
            "physicalLocation": {"artifactLocation": file, "region": {"startLine": line}},
            "logicalLocations": [{"fullyQualifiedName": f"test_inner.py::{test}", "kind": "function"}],
        }

    assert run["results"] == [
        {
            "ruleId": "rule-a",
            "level": "error",
            "message": {"text": "made-up check: seen\ncause: cause\nfix: fix"},
            "locations": [location(5, "test_fails")],
            "properties": {"steps": [1, 2], "parameters": ["weight"], "evidence": {"norm": "nan"}},
        },
        {
            "ruleId": "not-judged",
            "kind": "open",
            "level": "none",
            "message": {"text": "made-up check: could not judge\nnothing to see"},
            "locations": [location(8, "test_judges_nothing")],
            "properties": {"steps": [], "parameters": [], "evidence": {}},
        },
    ]


def test_sarif_is_written_without_findings_too(run_tests, pytester):
    """A run in which all is well says so; one that only collects says nothing."""
    run_tests("def test_it():\n    pass\n", "--tl-sarif=out/a.sarif", "--collect-only")
    assert list((pytester.path / "out").iterdir()) == []
    run_tests("def test_it():\n    pass\n", "--tl-sarif=out/a.sarif")
    assert json.loads((pytester.path / "out" / "a.sarif").read_text())["runs"][0]["results"] == []


def test_names_of_files_are_readable_and_apart():
    """A long or odd name is shortened, and two tests never share a file."""
    assert file_name("tests/a.py::TestB::test_c[x/1]") == "tests_a.py_TestB_test_c[x_1]-ffa11b80.jsonl"
    assert file_name("t.py::test[a/b]") != file_name("t.py::test[a:b]")
    assert len(file_name("x" * 1000)) == 100 + len("-01234567.jsonl")


class _Broken:
    """A run whose figures cannot be read any more, as after an error of the device."""

    records = (1,)

    @property
    def report(self):
        raise RuntimeError("device-side assert triggered")

    def to_jsonl(self, path):
        raise RuntimeError("device-side assert triggered")


def test_a_run_that_cannot_be_read_is_told_as_such(tmp_path):
    """The file of a test is written although the device has failed, and the failed test is reported."""
    log, run = TestLog(keeps_runs=True), _Broken()
    log.keep(run)
    assert log.unasked() == []
    log.write(tmp_path, {"nodeid": "t.py::test_it"})
    (path,) = tmp_path.iterdir()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "test", "nodeid": "t.py::test_it", "outcome": "passed"},
        {"kind": "run", "run": 0, "error": "device-side assert triggered"},
    ]


def test_without_a_report_runs_are_not_kept_alive():
    """A test that frees its model finds it freed."""
    log, run = TestLog(keeps_runs=False), _Broken()
    log.keep(run)
    del run
    assert log._seen[0]() is None
    assert log.unasked() == []
