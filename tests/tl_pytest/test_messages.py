"""A failing check shows the person's line and the check's message, and none of the checks' own frames."""

from __future__ import annotations

import pytest

VERDICT = """
from tl_pytest import Finding, Report

def check():
    finding = Finding("made-up-rule", "seen", "cause", "fix")
    Report("made-up check", (finding,)).require()

def test_it(training_runner):
    check()
"""


def failure(result: pytest.RunResult) -> list[str]:
    """Give the lines of the only failure, from its title to the summary."""
    (start,) = (number for number, line in enumerate(result.outlines) if line.startswith("____"))
    end = next(n for n, line in enumerate(result.outlines) if n > start and line.startswith("===="))
    return result.outlines[start + 1 : end]


def test_a_verdict_ends_at_the_persons_line(run_tests):
    """The traceback of a CheckFailed has the person's frames only, and the message is whole."""
    result = run_tests(VERDICT)
    assert failure(result) == [
        "",
        "training_runner = TrainingRunner(device='cpu', seed=0)",
        "",
        "    def test_it(training_runner):",
        ">       check()",
        "",
        "test_inner.py:8: ",
        "_ " * 59 + "_ ",
        "",
        "    def check():",
        '        finding = Finding("made-up-rule", "seen", "cause", "fix")',
        '>       Report("made-up check", (finding,)).require()',
        "E       tl_core.CheckFailed: made-up check: failed, 1 finding",
        "E       ",
        "E       [made-up-rule] seen",
        "E         cause: cause",
        "E         fix: fix",
        "",
        "test_inner.py:5: CheckFailed",
        f"{' tl findings ':-^120}",
        "made-up check: failed",
        "  [made-up-rule] seen",
    ]


def test_the_summary_line_names_the_verdict(run_tests):
    """The line of the short summary has the verdict's first line."""
    result = run_tests(VERDICT)
    result.stdout.fnmatch_lines(
        ["FAILED test_inner.py::test_it - tl_core.CheckFailed: made-up check: failed, 1 finding"]
    )


@pytest.mark.parametrize("style", ["short", "line", "native"])
def test_other_traceback_styles_are_as_short(run_tests, style):
    """The frames are cut in every style of traceback."""
    result = run_tests(VERDICT, f"--tb={style}")
    result.stdout.fnmatch_lines(["*made-up check: failed, 1 finding"])
    assert [line for line in result.outlines if "tl_core/" in line or "tl_pytest/" in line] == []


def test_full_trace_shows_every_frame(run_tests):
    """--full-trace brings the cut frames back."""
    result = run_tests(VERDICT, "--full-trace")
    result.stdout.fnmatch_lines(["*tl_core*CheckFailed"])
    assert any("tl_core/" in line for line in result.outlines)


def test_a_failing_loop_shows_one_frame(run_tests, loop):
    """A finding of a run, through the runner and the run's assertion, shows the test's line only."""
    source = (
        loop.replace("setup.optimizer.zero_grad()", "pass")
        + """
def test_it(training_runner):
    run = training_runner.run(make_setup, make_batch(), train_step, steps=6)
    run.assert_healthy()
"""
    )
    lines = failure(run_tests(source))
    assert [line for line in lines if line.startswith(">")] == [">       run.assert_healthy()"]
    assert any(line.startswith("E       [missing-zero-grad] ") for line in lines)
    assert not [line for line in lines if "packages/" in line or "site-packages" in line]


def test_misuse_shows_the_persons_line(run_tests, loop):
    """A wrong argument shows the call that has it, not the check that noticed."""
    call = "training_runner.run(make_setup, make_batch(), train_step, steps=0)"
    lines = failure(run_tests(f"{loop}\ndef test_it(training_runner):\n    {call}\n"))
    assert [line for line in lines if line.startswith(">")] == [f">       {call}"]
    assert lines[-1].endswith(": ValueError")


def test_an_exception_of_the_persons_code_keeps_its_place(run_tests, loop):
    """An exception raised in the person's step shows the test's line and the one that raised, nothing between."""
    source = (
        loop.replace("loss.backward()", "raise RuntimeError('out of luck')")
        + "\ndef test_it(training_runner):\n    training_runner.run(make_setup, make_batch(), train_step)\n"
    )
    lines = failure(run_tests(source))
    assert [line for line in lines if line.startswith(">")] == [
        ">       training_runner.run(make_setup, make_batch(), train_step)",
        ">       raise RuntimeError('out of luck')",
    ]
    assert "E       RuntimeError: out of luck" in lines
    assert not [line for line in lines if "tl_telemetry/" in line or "tl_pytest/" in line]


def test_an_error_of_torch_in_the_persons_code_keeps_torchs_frames(run_tests, loop):
    """What torch raises in the person's step is shown down to torch, without the checks above it."""
    source = (
        loop.replace("loss.backward()", "loss.sum(7)")
        + "\ndef test_it(training_runner):\n    training_runner.run(make_setup, make_batch(), train_step)\n"
    )
    lines = failure(run_tests(source))
    assert ">       loss.sum(7)" in lines
    assert any(line.startswith("E       IndexError: Dimension out of range") for line in lines)
    assert not [line for line in lines if "tl_telemetry/" in line or "tl_pytest/" in line]


def test_what_calls_the_persons_code_for_a_check_is_cut(run_tests, loop):
    """Where a check calls the person's code by way of a library, neither's frames stand before the line that raised."""
    source = (
        loop
        + """
class Loss(torch.nn.Module):
    def forward(self, model, batch):
        raise RuntimeError("out of luck")

def test_it(training_runner):
    training_runner.run(make_setup, make_batch(), loss_fn=Loss())
"""
    )
    lines = failure(run_tests(source))
    assert [line for line in lines if line.startswith(">")] == [
        ">       training_runner.run(make_setup, make_batch(), loss_fn=Loss())",
        '>       raise RuntimeError("out of luck")',
    ]
    assert any("torch/nn/modules/module.py" in line for line in run_tests(source, "--full-trace").outlines)


def test_an_error_of_a_library_that_a_check_calls_is_shown_whole(run_tests, loop):
    """Where no line of the person's is below the checks, theirs are shown: they may be what is wrong."""
    call = "training_runner.run(make_setup, make_batch(), loss_fn=torch.nn.functional.mse_loss)"
    result = run_tests(f"{loop}\ndef test_it(training_runner):\n    {call}\n")
    result.assert_outcomes(failed=1)
    assert any("tl_core/_step.py" in line for line in failure(result))


def test_a_defect_of_the_checks_keeps_its_frames(run_tests, loop):
    """An exception that is neither a verdict nor about an argument may be a defect: nothing is cut."""
    source = (
        loop
        + """
def test_it(training_runner, monkeypatch):
    monkeypatch.setattr("tl_pytest._runner.tl_telemetry", None)
    training_runner.run(make_setup, make_batch(), train_step)
"""
    )
    lines = failure(run_tests(source))
    assert [line for line in lines if line.startswith(">")] == [
        ">       training_runner.run(make_setup, make_batch(), train_step)",
        ">       run = tl_telemetry.run_training(",
    ]


def test_an_expected_failure_stays_one(run_tests):
    """xfail with raises= sees the verdict as any exception."""
    mark = "import pytest\nfrom tl_pytest import CheckFailed\n\n@pytest.mark.xfail(raises=CheckFailed)\n"
    run_tests(VERDICT.replace("def test_it", f"{mark}def test_it")).assert_outcomes(xfailed=1)
