"""The plugin does the same with workers, and without xdist."""

from __future__ import annotations

import pytest

SOURCE = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number, training_runner, torch_seed, torch_device):
    assert (training_runner.seed, torch_seed, torch_device.type) == (6, 6, "cpu")
    assert ("PYTEST_XDIST_WORKER" in os.environ) == WORKERS
    assert training_runner._common.allow == ("lr-zero", "no-update")
    assert training_runner._common.tolerances == (("training_resume", 0.5, None, None),)

def test_verdict(training_runner):
    from tl_pytest import Finding, Report
    Report("made-up check", (Finding("made-up-rule", "seen", "cause", "fix"),)).require()
"""


INI = "[pytest]\ntl_device = cpu\ntl_allow = lr-zero\ntl_tolerances = training_resume: rtol=0.5\n"
OPTIONS = ("--tl-seed=6", "--tl-allow=no-update")


def test_workers_get_the_settings(run_tests, pytester):
    """Options reach the workers, and a verdict comes back from them whole."""
    pytest.importorskip("xdist")
    pytester.makeini(INI)
    result = run_tests(f"WORKERS = True\n{SOURCE}", "-n", "2", *OPTIONS, subprocess=True)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "tl-pytest: torch=*, device=cpu, seed=6, allow=lr-zero,no-update",
            "E       tl_core.CheckFailed: made-up check: failed, 1 finding",
        ]
    )


def test_a_wrong_value_stops_before_the_workers(run_tests):
    """A usage error is said once, by the controller."""
    pytest.importorskip("xdist")
    result = run_tests(f"WORKERS = True\n{SOURCE}", "-n", "2", "--tl-device=gpu", subprocess=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if "unknown device 'gpu'" in line]) == 1


def test_workers_run_each_test_on_each_device(run_tests):
    """Devices are the same in all workers, so that these agree on the tests that there are."""
    pytest.importorskip("xdist")
    source = "def test_it(torch_device, torch_seed):\n    assert (torch_device.type, torch_seed) == ('cpu', 6)\n"
    result = run_tests(source, "-n", "2", "-v", "--tl-seed=6", "--tl-device=auto", "-k", "cpu", subprocess=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*PASSED test_inner.py::test_it[[]cpu[]]*"])


def test_without_xdist(run_tests, pytester):
    """Nothing of the plugin needs xdist."""
    pytester.makeini(INI)
    result = run_tests(f"WORKERS = False\n{SOURCE}", "-p", "no:xdist", *OPTIONS)
    result.assert_outcomes(passed=4, failed=1)
