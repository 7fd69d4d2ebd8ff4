"""The devices that tests run on: which there are, how a run takes several, and who goes before whom."""

from __future__ import annotations

import os

import pytest
import torch

from tl_pytest._device import available_devices, find_device


def _pretend(monkeypatch, kind, count):
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "there", "expected"),
    [
        ("cpu", ("cuda", 2), "cpu"),
        ("cuda", ("cuda", 1), "cuda"),
        ("cuda:1", ("cuda", 2), "cuda:1"),
    ],
    ids=["cpu", "accelerator", "with index"],
)
def test_devices_that_are_there(monkeypatch, name, there, expected):
    """A device that is there is given as asked for."""
    _pretend(monkeypatch, *there)
    assert find_device(name, "--tl-device") == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "there", "sees"),
    [
        ("cuda", (None, 0), "no accelerator here"),
        ("mps", ("cuda", 2), "2 of type cuda here"),
        ("cuda:2", ("cuda", 2), "2 of type cuda here"),
    ],
    ids=["none", "another kind", "index too large"],
)
def test_a_device_that_is_not_there_fails(monkeypatch, name, there, sees):
    """A device that was asked for by name is never replaced silently, nor is the test skipped."""
    _pretend(monkeypatch, *there)
    with pytest.raises(pytest.fail.Exception) as caught:
        find_device(name, "tl_device in pytest.ini")
    assert str(caught.value) == (
        f"tl_device in pytest.ini asks for {name}, but torch {torch.__version__} sees {sees}; "
        "auto takes the CPU, and the accelerator where there is one"
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_missing_device_is_an_error_of_each_test_without_a_traceback(run_tests):
    """The tests that use the device fail at their set-up, with one line."""
    result = run_tests("def test_it(torch_device):\n    pass\n", "--tl-device=cuda:0")
    result.assert_outcomes(errors=1)
    lines = result.outlines
    start = lines.index(next(line for line in lines if "ERROR at setup of test_it" in line))
    assert lines[start + 1].startswith("--tl-device asks for cuda:0, but torch ")
    assert "short test summary" in lines[start + 2]


@pytest.mark.parametrize(
    ("there", "expected"),
    [((None, 0), ("cpu",)), (("cuda", 0), ("cpu",)), (("mps", 1), ("cpu", "mps"))],
    ids=["none", "broken", "one"],
)
def test_auto_is_the_cpu_and_what_torch_can_use(monkeypatch, there, expected):
    """An accelerator counts where torch can use it."""
    _pretend(monkeypatch, *there)
    assert available_devices() == expected


@pytest.mark.parametrize("before", [None, "0"], ids=["unset", "set"])
def test_asking_for_accelerators_goes_through_the_drivers_library(monkeypatch, before):
    """torch is told to ask in the way after which a process can still fork; the environment is put back."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    seen = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: seen.append(os.environ[name]) or False)
    assert available_devices() == ("cpu",)
    assert seen == ["1"]
    assert os.environ.get(name) == before


DEVICES = """
import pytest
import torch

seen = []

@pytest.mark.parametrize("number", [1, 2])
def test_it(torch_device, number):
    seen.append(torch_device.type)

def test_runner(training_runner):
    assert training_runner.device.type == "cpu"

def test_without():
    pass
"""


def names(result: pytest.RunResult) -> list[str]:
    return [line.split()[0].partition("::")[2] for line in result.outlines if line.startswith("test_inner.py::")]


def test_a_run_with_auto_names_each_device(run_tests, monkeypatch):
    """Under auto each test that uses a device, also through the runner, runs on each and has its name."""
    _pretend(monkeypatch, None, 0)
    result = run_tests(DEVICES, "--tl-device=auto", "-v", "-p", "no:xdist")
    result.assert_outcomes(passed=4)
    assert names(result) == ["test_it[cpu-1]", "test_it[cpu-2]", "test_runner[cpu]", "test_without"]


def test_a_run_with_several_devices_takes_each(run_tests, monkeypatch):
    """Each test runs once on each device of the list."""
    _pretend(monkeypatch, "meta", 1)
    monkeypatch.setattr("tl_pytest._device.is_device", lambda name: True)
    monkeypatch.setattr("tl_pytest._settings.is_device", lambda name: True)
    source = "seen = []\ndef test_it(torch_device):\n    seen.append(torch_device.type)\n"
    check = "def test_seen():\n    assert seen == ['cpu', 'meta']\n"
    result = run_tests(source + check, "--tl-device=cpu, meta", "-v")
    result.assert_outcomes(passed=3)
    assert names(result) == ["test_it[cpu]", "test_it[meta]", "test_seen"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_device_of_a_list_that_is_not_there_is_an_error(run_tests):
    """What is asked for by name is never left out: the tests on it fail, the others run."""
    result = run_tests(DEVICES, "--tl-device=cpu,cuda:0", "-v")
    result.assert_outcomes(passed=4, errors=3)
    assert "test_it[cuda:0-1]" in names(result)
    result.stdout.fnmatch_lines(["--tl-device asks for cuda:0, but torch * sees no accelerator here; auto takes *"])


def test_a_test_may_name_its_own_devices(run_tests):
    """With indirect parametrization a test goes before the options; a name that is none fails it."""
    source = """
import pytest

@pytest.mark.parametrize("torch_device", ["cpu", "gpu"], indirect=True)
def test_it(torch_device):
    assert torch_device.type == "cpu"
"""
    for arguments in ([], ["--tl-device=auto"]):
        result = run_tests(source, "-v", *arguments)
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["*unknown device 'gpu'; allowed: cpu, or one of cuda, *, as in cuda:1"])


OWN = """
import pytest
import torch

@pytest.fixture
def torch_device():
    return "meta"
"""


@pytest.mark.parametrize("option", ["--tl-device=cpu", "--tl-device=auto"])
def test_a_fixture_of_the_project_goes_before_the_plugins(run_tests, pytester, option):
    """A torch_device in a conftest or in the module takes the place of the plugin's, also for the runner."""
    source = """
def test_it(training_runner, torch_device):
    assert torch_device == "meta"
    assert training_runner.device.type == "meta"
"""
    pytester.makeconftest(OWN)
    result = run_tests(source, option, "-v")
    result.assert_outcomes(passed=1)
    assert names(result) == ["test_it"]


def test_a_fixture_of_the_project_may_use_the_plugins(run_tests, pytester):
    """A torch_device that asks for the plugin's runs on each device, as that would."""
    pytester.makeconftest(
        "import pytest\n@pytest.fixture\ndef torch_device(torch_device):\n    return torch_device.type\n"
    )
    result = run_tests("def test_it(torch_device):\n    assert torch_device == 'cpu'\n", "--tl-device=auto", "-v")
    result.assert_outcomes(passed=1)
    assert names(result) == ["test_it[cpu]"]


def test_a_fixture_that_is_asked_for_by_name_has_the_first_device(run_tests):
    """request.getfixturevalue comes too late for a test to run on each device."""
    source = "def test_it(request):\n    assert request.getfixturevalue('torch_device').type == 'cpu'\n"
    for option in ("--tl-device=auto", "--tl-device=cpu,cuda", "--tl-device=cpu"):
        run_tests(source, option).assert_outcomes(passed=1)


def test_a_fixture_of_another_plugin(run_tests, pytester):
    """Of two plugins' fixtures of one name pytest takes that of the one loaded last; `-p` loads before entry points."""
    pytester.makepyfile(other_plugin=OWN)
    pytester.syspathinsert()
    source = "def test_it(torch_device):\n    assert getattr(torch_device, 'type', 'theirs') == WINNER\n"
    run_tests(source.replace("WINNER", "'cpu'"), "-p", "other_plugin").assert_outcomes(passed=1)
    pytester.makeconftest("from other_plugin import torch_device\n")
    run_tests(source.replace("WINNER", "'theirs'"), "-p", "other_plugin").assert_outcomes(passed=1)
