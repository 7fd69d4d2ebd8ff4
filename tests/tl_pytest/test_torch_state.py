"""--tl-deterministic and --tl-num-threads hold for the tests that use a fixture, and are put back."""

from __future__ import annotations

import os

import pytest
import torch

from tl_pytest._torch_state import torch_settings

NAMES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


def state() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        *(os.environ.get(name) for name in NAMES),
    )


@pytest.fixture
def _other(monkeypatch):
    """A process that has settings of its own."""
    before = state()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1], warn_only=before[2])
    torch.backends.cudnn.benchmark = before[3]


@pytest.mark.usefixtures("_other")
def test_inside_torch_is_as_asked_for_and_afterwards_as_it_was():
    """Threads, deterministic algorithms, cuDNN's choice and the environment are set, also nested, and put back."""
    before = state()
    with torch_settings(deterministic=True, num_threads=3):
        assert state() == (3, True, False, False, "3", ":4096:8")
        with torch_settings(deterministic=True, num_threads=2):
            assert state() == (2, True, False, False, "2", ":4096:8")
        assert state() == (3, True, False, False, "3", ":4096:8")
    assert state() == before


@pytest.mark.usefixtures("_other")
def test_an_error_inside_puts_all_back():
    """Settings are put back when the test raises."""
    before = state()
    with pytest.raises(KeyError), torch_settings(deterministic=True, num_threads=3):
        raise KeyError
    assert state() == before


@pytest.mark.usefixtures("_other")
def test_nothing_asked_for_changes_nothing():
    """Without options torch and the environment stay as they are."""
    before = state()
    with torch_settings(deterministic=False, num_threads=None):
        assert state() == before


def test_a_workspace_of_the_persons_own_stays(monkeypatch):
    """The other value that cuBLAS takes for deterministic results is left alone."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with torch_settings(deterministic=True, num_threads=None):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_each_fixture_brings_the_settings(run_tests):
    """A test that uses any of the fixtures runs with them; a nondeterministic operation is an error in it."""
    source = """
import pytest
import torch

@pytest.mark.parametrize("fixture", ["torch_device", "torch_seed", "training_runner"])
def test_it(fixture, request):
    request.getfixturevalue(fixture)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (True, 2)
"""
    run_tests(source, "--tl-deterministic", "--tl-num-threads=2").assert_outcomes(passed=3)
    run_tests(source).assert_outcomes(failed=3)
