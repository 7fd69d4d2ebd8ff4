"""Tolerances from the configuration and from markers reach the checks that compare runs."""

from __future__ import annotations

import pytest
import torch

import tl_core
from tl_pytest._common import Common
from tl_pytest._runner import TrainingRunner
from tl_pytest._tolerances import (
    DEVICES,
    NAMES,
    ToleranceOverride,
    find_tolerance,
    override_of_marker,
    parse_tolerances,
)

FORM = "lines such as training_resume: rtol=1e-4, cuda.rtol=1e-3"


def test_the_names_are_those_of_tl_core():
    """The plugin's list of names, which it reads without torch, is that of the tolerances that there are."""
    with pytest.raises(ValueError) as caught:
        tl_core.Tolerances().get("none")
    assert str(caught.value) == f"there is no tolerance named 'none'; the names are {', '.join(NAMES)}"
    built_in = [kind for kind in DEVICES if kind != "npu"]  # which torch_npu adds
    assert [torch.device(kind).type for kind in built_in] == built_in


def test_lines_of_the_configuration():
    """A line gives tolerances of one name, for all devices or one type; those for one type come first."""
    lines = ["training_resume: rtol=1e-4, cuda.rtol = 1e-3,cuda.atol=0", " grad_accumulation :atol=1"]
    assert parse_tolerances(lines) == (
        ToleranceOverride("training_resume", rtol=1e-3, device="cuda"),
        ToleranceOverride("training_resume", atol=0.0, device="cuda"),
        ToleranceOverride("training_resume", rtol=1e-4),
        ToleranceOverride("grad_accumulation", atol=1.0),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("training_resume", f"'training_resume' gives no tolerance; allowed: {FORM}"),
        ("training_resume: ", f"'training_resume: ' gives no tolerance; allowed: {FORM}"),
        (3, f"3 is no text; allowed: {FORM}"),
        (
            "training_resume: 1e-4",
            f"'training_resume: 1e-4': '1e-4' is not of the form rtol=1e-4; allowed: {FORM}",
        ),
        (
            "resume: rtol=1",
            "'resume: rtol=1': there is no tolerance named 'resume'; the names are grad_accumulation, training_resume",
        ),
        ("training_resume: tol=1", "'training_resume: tol=1': 'tol' is not rtol or atol"),
        (
            "training_resume: gpu.rtol=1",
            "'training_resume: gpu.rtol=1': there is no type of device named 'gpu'; the types are "
            "cpu, cuda, hpu, mps, mtia, npu, xpu",
        ),
        (
            "training_resume: rtol=much",
            "'training_resume: rtol=much': rtol must be a number, finite and >= 0, got 'much'",
        ),
        ("training_resume: atol=-1", "'training_resume: atol=-1': atol must be a number, finite and >= 0, got -1.0"),
        ("training_resume: atol=inf", "'training_resume: atol=inf': atol must be a number, finite and >= 0, got inf"),
        (
            "training_resume: rtol=1, rtol=2",
            "'training_resume: rtol=1, rtol=2' gives rtol of training_resume a second time",
        ),
    ],
    ids=lambda value: str(value) if len(str(value)) < 35 else "",
)
def test_lines_that_make_no_sense(line, message):
    """A line that is not understood whole is an error that shows the line and what is allowed."""
    with pytest.raises(ValueError) as caught:
        parse_tolerances([line])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {"rtol": 1}, "it takes one name by position, grad_accumulation or training_resume, got 0 arguments"),
        (("training_resume", 1e-3), {}, "it takes one name by position, * got 2 arguments"),
        (("training_resume",), {}, "it gives neither rtol nor atol"),
        (("training_resume",), {"tol": 1}, "'tol' is not rtol, atol or device"),
        (("resume",), {"rtol": 1}, "there is no tolerance named 'resume'; the names are *"),
        (("training_resume",), {"rtol": "1"}, "rtol must be a number, finite and >= 0, got '1'"),
        (("training_resume",), {"rtol": True}, "rtol must be a number, finite and >= 0, got True"),
        (("training_resume",), {"rtol": 1, "device": "cuda:0"}, "there is no type of device named 'cuda:0'; *"),
    ],
    ids=["no name", "by position", "nothing", "unknown key", "unknown name", "text", "truth value", "index"],
)
def test_markers_that_make_no_sense(arguments, keywords, message, run_tests):
    """A wrong marker fails the tests that carry it, with one line that names the marker and the test."""
    with pytest.raises(ValueError) as caught:
        override_of_marker(arguments, keywords)
    text = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())])
    source = f"import pytest\n@pytest.mark.tl_tolerance({text})\ndef test_it():\n    pass\n"
    result = run_tests(source)
    result.assert_outcomes(errors=1)
    seen = f"@pytest.mark.tl_tolerance of test_inner.py::test_it: {caught.value}"
    assert seen in result.outlines
    result.stdout.fnmatch_lines([f"@pytest.mark.tl_tolerance of test_inner.py::test_it: {message}"])


def test_the_first_that_fits_is_taken_for_each_number():
    """Relative and absolute tolerances are looked up apart; another device's and another name's do not count."""
    overrides = (
        ToleranceOverride("training_resume", rtol=1.0, device="cuda"),
        ToleranceOverride("training_resume", rtol=2.0),
        ToleranceOverride("training_resume", rtol=3.0, atol=4.0),
    )
    assert find_tolerance(overrides, "training_resume", "cuda") == (1.0, 4.0)
    assert find_tolerance(overrides, "training_resume", "cpu") == (2.0, 4.0)
    assert find_tolerance(overrides, "grad_accumulation", "cpu") == (None, None)


def test_an_argument_of_the_call_goes_before_all(monkeypatch):
    """What is given to a check is not replaced, and what is said for another device does not count."""
    seen = []
    monkeypatch.setattr("tl_resume.assert_resume_equivalent", lambda *_, **keywords: seen.append(keywords))
    monkeypatch.setattr("tl_accum.assert_accumulation_equivalent", lambda *_, **keywords: seen.append(keywords))
    overrides = (
        ToleranceOverride("training_resume", rtol=0.3, device="meta"),
        ToleranceOverride("training_resume", rtol=0.1, atol=0.2),
    )
    runner = TrainingRunner("cpu", 0, Common(overrides))
    runner.assert_resume_equivalent("setup", "data", "step", rtol=0.0)
    runner.assert_resume_equivalent("setup", "data", "step", device="meta")
    runner.assert_accumulation_equivalent("setup", "data", "make_step")
    assert [(call["rtol"], call["atol"]) for call in seen] == [(0.0, 0.2), (0.3, 0.2), (None, None)]


SOURCE = """
import pytest
import tl_resume

@pytest.fixture(autouse=True)
def seen(monkeypatch):
    calls = []
    monkeypatch.setattr(tl_resume, "assert_resume_equivalent", lambda *_, **given: calls.append(given) or calls[-1])

def compared(runner, **given):
    call = runner.assert_resume_equivalent("setup", "data", "step", **given)
    return call["rtol"], call["atol"]
"""
MARKED = """
pytestmark = pytest.mark.tl_tolerance("training_resume", rtol=0.5, atol=0.5)

@pytest.mark.tl_tolerance("training_resume", rtol=0.25)
@pytest.mark.tl_tolerance("training_resume", rtol=0.125, device="cpu")
@pytest.mark.tl_tolerance("training_resume", rtol=0.0625, device="cuda")
def test_own(training_runner):
    assert compared(training_runner) == (0.125, 0.5)
    assert compared(training_runner, device="mps") == (0.25, 0.5)
    assert compared(training_runner, rtol=0.0) == (0.0, 0.5)

def test_module(training_runner):
    assert compared(training_runner) == (0.5, 0.5)
"""


def test_markers_go_before_the_file(run_tests, pytester):
    """The test's own markers go before the module's, these before the file; a device's before those for all."""
    pytester.makeini("[pytest]\ntl_tolerances = training_resume: rtol=1, atol=1, cpu.rtol=2\n")
    run_tests(SOURCE + MARKED).assert_outcomes(passed=2)


def test_the_file_goes_before_the_defaults(run_tests, pytester):
    """Without a marker the file's tolerances reach the check, that of the device before that for all."""
    pytester.makeini("[pytest]\ntl_tolerances =\n    training_resume: rtol=1, cpu.rtol=2\n")
    run_tests(
        SOURCE + "def test_it(training_runner):\n"
        "    assert compared(training_runner) == (2.0, None)\n"
        "    assert compared(training_runner, device='cuda:1') == (1.0, None)\n"
    ).assert_outcomes(passed=1)


DIFFERENT = """
import pytest
from tl_pytest import CheckFailed, standard_step

def loss_fn(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def off(k):  # the gradients are wrong by a thousandth
    return standard_step(lambda m, b: loss_fn(m, b) * (1.001 if k > 1 else 1.0), accumulation_steps=k)

def test_it(training_runner):
    with pytest.raises(CheckFailed):
        training_runner.assert_accumulation_equivalent(make_setup, make_batch(), off)

@pytest.mark.tl_tolerance("grad_accumulation", rtol=1e-2)
def test_wider(training_runner):
    training_runner.assert_accumulation_equivalent(make_setup, make_batch(), off)
"""


def test_a_tolerance_decides_a_verdict(run_tests, loop):
    """With a tolerance of a hundredth, from a marker, gradients that are off by a thousandth pass."""
    run_tests(loop + DIFFERENT).assert_outcomes(passed=2)
