"""Each check package has an example that needs no other; it passes, and fails where its loop is broken.

Try: break a line of the loop that it checks, and run the program: ``python examples/coverage_alone.py``.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
from one_line_bugs import Bug, with_bug

FOLDER = Path(__file__).parent
# the file with the loop, and a bug in it
BROKEN = {
    "coverage": (
        "coverage_alone",
        Bug(
            "forget the norm",
            "uncovered-parameter",
            "    body = [*model.decoder.parameters(), *model.norm.parameters()]",
            "    body = [*model.decoder.parameters()]",
        ),
    ),
    "telemetry": (
        "telemetry_alone",
        Bug("forget zero_grad()", "missing-zero-grad", "        optimizer.zero_grad()", ""),
    ),
    "resume": (
        "resume_loop",
        Bug(
            "forget the scheduler when loading",
            "scheduler-not-restored",
            '    setup.scheduler.load_state_dict(checkpoint["scheduler"])',
            "",
        ),
    ),
    "accum": (
        "accumulation_loop",
        Bug(
            "forget the incomplete last group",
            "last-group-leaks",
            "        if (place + 1) % accumulation_steps == 0 or place + 1 == EPOCH_LENGTH:",
            "        if (setup.step_index + 1) % accumulation_steps == 0:",
        ),
    ),
    "amp": (
        "mixed_precision_loop",
        Bug("forget to unscale", "clip-before-unscale", "        setup.scaler.unscale_(setup.optimizer)", ""),
    ),
}
# the packages that each may import: itself, and those that it brings
BROUGHT = {
    "coverage": {"tl_coverage", "tl_core"},
    "telemetry": {"tl_telemetry", "tl_coverage", "tl_core"},
    **{package: {f"tl_{package}", "tl_telemetry", "tl_coverage", "tl_core"} for package in ("resume", "accum", "amp")},
}


def imported(name, folder=FOLDER):
    """Return the modules that a file imports, and those that the files beside it import among them."""
    found = set()
    for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    here = {module for module in found if (folder / f"{module}.py").exists()}
    return found.union(*(imported(module, folder) for module in here))


@pytest.fixture
def run_program(monkeypatch, capsys):
    def run(program):
        monkeypatch.setattr(sys, "argv", [program.__name__])
        status = program.main()
        return status, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("package", BROKEN)
def test_it_passes(package, run_program):
    """The loop is right, and the exit status says so."""
    status, said = run_program(importlib.import_module(f"{package}_alone"))
    assert status == 0
    assert said[-1].endswith(": passed")


@pytest.mark.parametrize("package", BROKEN)
def test_it_fails_where_the_loop_is_broken(package, run_program, monkeypatch):
    """The first finding names what is broken, and the exit status is 1."""
    name, bug = BROKEN[package]
    program, broken = importlib.import_module(f"{package}_alone"), with_bug(bug, FOLDER / f"{name}.py")
    if program.__name__ == name:
        program = broken
    else:
        monkeypatch.setattr(program, "loop", broken)
    status, said = run_program(program)
    assert status == 1
    assert next(line for line in said if line.startswith("[")).startswith(f"[{bug.rule}] ")


@pytest.mark.parametrize("package", BROKEN)
def test_it_needs_no_other_package(package):
    """Of the packages of this workspace it imports its own, and what that brings."""
    used = {module for module in imported(f"{package}_alone") if module.startswith("tl_")}
    assert f"tl_{package}" in used
    assert used <= BROUGHT[package]


def test_an_import_is_seen(tmp_path):
    """Of whatever form, in a function, or in another file that is imported."""
    (tmp_path / "program.py").write_text("import torch\nimport loop\n\ndef main():\n    from tl_amp import assert_x\n")
    (tmp_path / "loop.py").write_text("import tl_accum\n")
    assert imported("program", tmp_path) == {"torch", "loop", "tl_amp", "tl_accum"}
