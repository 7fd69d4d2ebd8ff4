"""pytest with the plugin installed does not import torch until a test asks for a fixture."""

from __future__ import annotations

import pytest

GUARD = """
import sys

def pytest_unconfigure():
    watched = ("torch", "numpy", "tl_accum", "tl_amp", "tl_core", "tl_coverage", "tl_resume", "tl_telemetry")
    watched += ("tl_hf", "tl_lightning", "accelerate", "lightning", "pytorch_lightning", "transformers", "greenlet")
    watched += ("tl_pytest._log", "tl_pytest._summary")
    heavy = [name for name in watched if name in sys.modules]
    print("imported:", ", ".join(heavy) or "nothing")
"""
PLAIN = "import tl_pytest\n\ndef test_plain():\n    assert callable(getattr(tl_pytest, '__getattr__'))\n"


@pytest.fixture
def imported(run_tests, pytester):
    """Run a test module in a process of its own and tell what was imported at its end."""

    def run(source: str, *arguments: str) -> list[str]:
        pytester.makeconftest(GUARD)
        result = run_tests(source, *arguments, subprocess=True)
        assert result.ret == 0
        return [line for line in result.outlines if line.startswith("imported:")]

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--collect-only",),
        ("--fixtures",),
        ("--tl-device=cuda:1,cpu", "--tl-seed=3", "--tl-allow=lr-zero", "--tl-deterministic", "--tl-num-threads=1"),
        ("-p", "no:xdist"),
    ],
    ids=" ".join,
)
def test_no_torch_without_a_fixture(imported, arguments):
    """A run, a collection and a listing leave torch alone, also with options and with tl_pytest itself imported."""
    assert imported(PLAIN, *arguments) == ["imported: nothing"]


def test_collecting_tests_that_use_fixtures_imports_nothing(imported):
    """Asking for the fixtures is not using them: a collection leaves torch and the frameworks alone."""
    source = "def test_it(training_runner, torch_seed, torch_device, lightning_trainer, hf_trainer):\n    pass\n"
    assert imported(source, "--collect-only", "--tl-device=cpu,cuda") == ["imported: nothing"]


def test_auto_imports_torch_at_collection_where_a_test_uses_a_device(imported):
    """Which devices there are only torch knows: it is asked where a test needs it, and the checks stay away."""
    assert imported(PLAIN, "--collect-only", "--tl-device=auto") == ["imported: nothing"]
    source = "def test_it(torch_device):\n    pass\n"
    assert imported(source, "--collect-only", "--tl-device=auto") == ["imported: torch, numpy"]


def test_the_guard_sees_an_import(imported):
    """A test module that imports torch shows up."""
    (line,) = imported("import torch\n\ndef test_it():\n    pass\n")
    assert line.startswith("imported: torch, ")


def test_the_fixture_imports_torch(imported):
    """A test that uses a fixture brings torch and the checks."""
    (line,) = imported("def test_it(training_runner):\n    pass\n")
    checks = "tl_accum, tl_amp, tl_core, tl_coverage, tl_resume, tl_telemetry"
    assert line == f"imported: torch, numpy, {checks}, tl_pytest._log, tl_pytest._summary"
