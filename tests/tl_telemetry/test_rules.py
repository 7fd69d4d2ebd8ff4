"""Every rule on a buggy loop that it catches, on the loop's healthy twin, and on correct loops that tempt it.

The loops of a rule are in ``cases/<rule_id with underscores>.py``. Such a file has

- ``buggy()`` and ``healthy()``, which differ by one line: the arguments of ``run_training``, under ``"judge"`` those
  of ``TrainingRun.check`` or a function that applies an assertion to the run;
- ``MESSAGE``, the whole text that the buggy loop gets;
- perhaps ``near_misses()``, further correct loops by name.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tl_core import (
    Batches,
    CheckFailed,
    Finding,
    NotJudged,
    Report,
    build_setup,
    preserve_rng,
    seed_everything,
    standard_step,
)
from tl_telemetry import observe, run_training
from tl_telemetry._evidence import Evidence
from tl_telemetry._judge import judge
from tl_telemetry._options import Options
from tl_telemetry._rule_ids import NOTES, RULES
from tl_telemetry._rules import RULES as RULE_FUNCTIONS

CASES = Path(__file__).parent / "cases"
DOCS = Path(__file__).parents[2] / "docs" / "rules.md"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_path(folder: Path, rule: str) -> Path:
    return folder / f"{rule.replace('-', '_')}.py"


LOADED = {rule: load(case_path(CASES, rule)) for rule in RULES if case_path(CASES, rule).exists()}
NEAR_MISSES = [
    pytest.param(rule, name, id=f"{rule}-{name}")
    for rule, module in LOADED.items()
    for name in (module.near_misses() if hasattr(module, "near_misses") else {})
]


def report_of(case: dict[str, Any]) -> Report:
    """Run a loop and judge it; what it warns of is shown to the run, and is no error of the test."""
    arguments = dict(case)
    judge = arguments.pop("judge", {})
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run = run_training(**arguments)
    if not callable(judge):
        report = run.check(**judge)
        assert_every_rule_looked(report)
        return report
    try:
        judge(run)
    except (CheckFailed, NotJudged) as error:
        return error.report
    return Report("assertion")


def observed_report_of(case: dict[str, Any]) -> Report:
    """Run a loop under ``observe``, without steps: a record then closes at each update."""
    with preserve_rng():
        seed_everything(0)
        return _observed(case)


def _observed(case: dict[str, Any]) -> Report:
    setup = build_setup(case["make_setup"], "cpu")
    step = case.get("step") or standard_step(case["loss_fn"])
    steps = case.get("steps", 20)
    batches = Batches(case["data"], steps, device="cpu")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with observe(setup) as run:
            for index in range(steps):
                setup.step_index = index
                step(setup, batches.batch(index))
    report = run.check(**case.get("judge", {}))
    assert_every_rule_looked(report)
    return report


def assert_every_rule_looked(report: Report) -> None:
    """Demand that no rule raised: the verdict survives that, but here it is a mistake in the rule."""
    assert [note.seen for note in report.notes if " could not look: " in note.seen] == []


def assert_silent(report: Report, rule: str) -> None:
    assert report.findings == (), str(report)
    assert report.judged, str(report)
    if rule in NOTES:
        assert rule not in {note.rule for note in report.notes}, str(report)


@pytest.mark.parametrize("rule", LOADED)
def test_buggy_loop_is_named_first_and_in_full(rule: str) -> None:
    """A rule's buggy loop gets its finding before any other, or its note, with the whole message."""
    report = report_of(LOADED[rule].buggy())
    if rule in NOTES:
        assert report.findings == (), str(report)
        chosen = [note for note in report.notes if note.rule == rule]
    else:
        chosen = list(report.findings)
    assert chosen, str(report)
    assert str(chosen[0]) == LOADED[rule].MESSAGE


@pytest.mark.parametrize("rule", LOADED)
def test_healthy_twin_is_left_alone(rule: str) -> None:
    """The same loop without the mistake gets no finding, and not the rule's note."""
    assert_silent(report_of(LOADED[rule].healthy()), rule)


@pytest.mark.parametrize(("rule", "name"), NEAR_MISSES)
def test_near_miss_is_left_alone(rule: str, name: str) -> None:
    """A correct loop that looks like the mistake gets no finding, and not the rule's note."""
    assert_silent(report_of(LOADED[rule].near_misses()[name]), rule)


@pytest.mark.parametrize("rule", LOADED)
def test_correct_loops_without_steps_are_left_alone(rule: str) -> None:
    """Healthy twins and near misses get no finding either where ``observe`` is told of no steps."""
    module = LOADED[rule]
    loops = {"healthy": module.healthy(), **(module.near_misses() if hasattr(module, "near_misses") else {})}
    # what an assertion or an option demands of a run is counted in steps
    reports = {name: observed_report_of(case) for name, case in loops.items() if not case.get("judge")}
    assert {name: str(report) for name, report in reports.items() if report.findings} == {}


def test_a_rule_that_raises_leaves_the_other_rules_their_verdict() -> None:
    """What the other rules find stays; a note names the rule and its error, which these tests take for a failure."""

    def broken(run: Evidence) -> Iterator[Finding]:
        yield Finding("lr-zero", "seen before it raised", "", "")
        raise KeyError("group")

    case = LOADED["missing-zero-grad"].buggy()
    case.pop("judge", None)
    report = judge(Evidence(run_training(**case).facts, Options()), [broken, *RULE_FUNCTIONS])
    assert [finding.rule for finding in report.findings] == ["lr-zero", "missing-zero-grad"]
    (note,) = [note for note in report.notes if note.rule == "not-judged"]
    assert note.seen == "the rule broken could not look: KeyError: 'group'"
    with pytest.raises(AssertionError):
        assert_every_rule_looked(report)


def lacking(rule: str, cases: Path, docs: str) -> list[str]:
    """List what a rule has not: a case file, each of its parts, an entry in the docs."""
    path = case_path(cases, rule)
    lacks = []
    if not path.exists():
        lacks.append(f"the file {path.name}")
    else:
        module = load(path)
        lacks += [f"{name} in {path.name}" for name in ("buggy", "healthy", "MESSAGE") if not hasattr(module, name)]
        if not getattr(module, "MESSAGE", f"[{rule}]").startswith(f"[{rule}]"):
            lacks.append(f"a MESSAGE of its own in {path.name}")
    if not re.search(rf"^## {re.escape(rule)}$", docs, re.MULTILINE):
        lacks.append(f"the entry `## {rule}` in docs/rules.md")
    return lacks


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_its_loops_and_its_entry(rule: str) -> None:
    """Every rule has a buggy loop, a healthy twin, a message and an entry in the docs."""
    assert lacking(rule, CASES, DOCS.read_text(encoding="utf-8") if DOCS.exists() else "") == []


def test_every_case_belongs_to_a_rule() -> None:
    """No case file is left of a rule that is gone."""
    expected = {case_path(CASES, rule).name for rule in RULES}
    assert {path.name for path in CASES.glob("*.py")} <= expected


def test_what_a_rule_lacks_is_seen(tmp_path: Path) -> None:
    """The test above notices a missing file, a missing part, another rule's message and a missing entry."""
    assert lacking("some-rule", tmp_path, "") == [
        "the file some_rule.py",
        "the entry `## some-rule` in docs/rules.md",
    ]
    (tmp_path / "some_rule.py").write_text("MESSAGE = '[other-rule] ...'\n\n\ndef buggy(): ...\n", encoding="utf-8")
    assert lacking("some-rule", tmp_path, "# Rules\n\n## some-rule\n\n## some-rule-too\n") == [
        "healthy in some_rule.py",
        "a MESSAGE of its own in some_rule.py",
    ]
