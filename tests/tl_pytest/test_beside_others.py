"""The plugin beside other plugins: pytest-randomly's reseeding, reruns, and plugins with fixtures of the same names."""

from __future__ import annotations

import pytest

# what pytest-randomly does: all generators that it knows are seeded anew before each phase of a test
RESEEDS = """
import random
import numpy

def reseed():
    random.seed(NUMBER)
    numpy.random.seed(NUMBER)

def pytest_runtest_setup(item):
    reseed()

def pytest_runtest_call(item):
    reseed()

def pytest_runtest_teardown(item):
    reseed()
"""

DRAWS = r"""
import random
import numpy
import pytest
import torch

@pytest.fixture
def drawn_before_the_test(torch_seed):
    return random.random(), float(numpy.random.rand())

def test_draws(drawn_before_the_test, torch_seed):
    print("\ndrawn:", drawn_before_the_test, random.random(), numpy.random.rand(), torch.rand(()).item())

def test_without():
    print("\nfree:", random.random(), numpy.random.rand())

def test_trains(training_runner):
    def make_batch(index):
        x = torch.randn(8, 3)
        return x, x.sum(1, keepdim=True)
    run = training_runner.run(make_setup, make_batch, train_step, steps=4)
    print("\nlosses:", run.losses)
    training_runner.assert_resume_equivalent(make_setup, make_batch, train_step)
"""


def printed(result: pytest.RunResult, word: str) -> list[str]:
    return [line for line in result.outlines if line.startswith(f"{word}:")]


@pytest.fixture
def run_reseeded(run_tests, pytester, loop):
    """Run the tests above beside a plugin that reseeds with a number (None: without it)."""

    def run(number: int | None) -> pytest.RunResult:
        arguments = []
        if number is not None:
            pytester.makepyfile(**{f"reseeds_{number}": RESEEDS.replace("NUMBER", str(number))})
            pytester.syspathinsert()
            arguments = ["-p", f"reseeds_{number}"]
        result = run_tests(loop + DRAWS, "-p", "no:randomly", "-s", *arguments)
        result.assert_outcomes(passed=3)
        return result

    return run


def test_reseeding_changes_neither_data_nor_checks(run_reseeded):
    """A test with a seed draws the same numbers whatever other plugins seed, and its runs are the same."""
    alone, first, second = (run_reseeded(number) for number in (None, 1, 2))
    for word in ("drawn", "losses"):
        assert len(printed(alone, word)) == 1
        assert printed(alone, word) == printed(first, word) == printed(second, word)


def test_reseeding_reaches_tests_without_a_seed(run_reseeded):
    """The plugin above does reseed: what a test without the fixture draws is the other plugin's."""
    assert printed(run_reseeded(1), "free") != printed(run_reseeded(2), "free")
    assert printed(run_reseeded(1), "free") == printed(run_reseeded(1), "free")


RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    item.config.attempt = 0
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.failed:
            report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
    item._initrequest()
    item.config.attempt = 1
    runtestprotocol(item, nextitem=nextitem, log=True)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True

def pytest_report_teststatus(report):
    return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None
"""


def test_the_last_attempt_of_a_repeated_test_counts(run_tests, pytester):
    """A test that is repeated with success has no finding at the end, and its files have the last verdict."""
    pytester.makeconftest(RERUNS)
    source = """
from tl_pytest import Finding, Report

def test_it(training_runner, pytestconfig):
    findings = () if pytestconfig.attempt else (Finding("rule", "seen", "cause", "fix"),)
    Report("made-up check", findings).require()
"""
    result = run_tests(source, "--tl-report=out", "--junitxml=out.xml")
    assert "1 passed, 1 rerun" in result.outlines[-1]
    result.stdout.no_fnmatch_line("tl: rule *")
    (path,) = (pytester.path / "out").iterdir()
    assert '"outcome": "passed"' in path.read_text()
    assert '"finding"' not in path.read_text()
    case = (pytester.path / "out.xml").read_text()
    assert 'name="tl_verdict" value="made-up check: passed"' in case
    assert "tl_finding" not in case


def test_a_runner_of_the_project(run_tests, pytester):
    """A training_runner of a conftest takes the plugin's place, and may ask for it."""
    own = "@pytest.fixture\ndef training_runner(training_runner):\n    return 'mine', training_runner.seed\n"
    pytester.makeconftest(f"import pytest\n{own}")
    source = "def test_it(training_runner):\n    assert training_runner == ('mine', 5)\n"
    run_tests(source, "--tl-seed=5").assert_outcomes(passed=1)


def test_a_seed_of_the_project(run_tests, pytester):
    """A torch_seed of a conftest is the seed of training_runner."""
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef torch_seed():\n    return 41\n")
    run_tests("def test_it(training_runner):\n    assert training_runner.seed == 41\n").assert_outcomes(passed=1)


@pytest.mark.parametrize("without", ["xdist", "terminal", "junitxml", "skipping"])
def test_other_plugins_may_be_missing(run_tests, without):
    """The plugin needs none of pytest's own plugins that a person may switch off."""
    result = run_tests("def test_it(training_runner):\n    pass\n", "-p", f"no:{without}", "--tl-sarif=out.sarif")
    assert result.ret == 0
