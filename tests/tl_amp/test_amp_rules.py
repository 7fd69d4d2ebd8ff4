"""Every rule of the mixed-precision check on buggy loops, on their healthy twins, and on correct loops that tempt it.

The loops of a rule are in ``amp_cases/<rule_id with underscores>.py``. Such a file has

- ``buggy()`` and ``healthy()``, by the name of a cause: loops that differ by one line, each the arguments of
  ``check_mixed_precision_training``;
- ``near_misses()``, further correct loops by name, at least two;
- ``MESSAGES``, by the names of the buggy loops, the whole text that they get;
- perhaps ``NOTED``, by name, the rules of the notes that a correct loop gets all the same.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tl_amp import AMP_FINDINGS, AMP_NOTES, assert_mixed_precision_training, check_mixed_precision_training
from tl_core import CheckFailed, Report

FOLDER = Path(__file__).parent
CASES = FOLDER / "amp_cases"
RULES = (*AMP_FINDINGS, *AMP_NOTES)


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the cases import what they share by its name
    spec.loader.exec_module(module)
    return module


def case_path(folder: Path, rule: str) -> Path:
    return folder / f"{rule.replace('-', '_')}.py"


def load_case(path: Path) -> ModuleType:
    return load(path, f"amp_case_{path.stem}")


load(FOLDER / "amp_loops.py", "amp_loops")
LOADED = {rule: load_case(case_path(CASES, rule)) for rule in RULES if case_path(CASES, rule).exists()}


def loops(part: str) -> list[Any]:
    """Return a parameter for each loop that the rules' files have under ``buggy``, ``healthy`` or ``near_misses``."""
    return [
        pytest.param(rule, name, id=f"{rule}-{name}")
        for rule, module in LOADED.items()
        for name in getattr(module, part, dict)()
    ]


def report_of(case: dict[str, Any], **options: Any) -> Report:
    """Check a loop; what it warns of (a scheduler before the optimizer) is no error of the test."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return check_mixed_precision_training(**case, **options)


@cache
def buggy_report(rule: str, name: str) -> Report:
    return report_of(LOADED[rule].buggy()[name])


def assert_silent(rule: str, name: str, report: Report) -> None:
    """Demand that a correct loop passes, with no other notes than the stated ones."""
    assert report.ok, str(report)
    stated = getattr(LOADED[rule], "NOTED", {}).get(name, ())
    assert tuple(note.rule for note in report.notes) == stated, str(report)


@pytest.mark.parametrize(("rule", "name"), loops("buggy"))
def test_buggy_loop_is_named_first_and_in_full(rule: str, name: str) -> None:
    """A rule's buggy loop gets its finding before any other, or its note, with the whole message."""
    report = buggy_report(rule, name)
    if rule in AMP_NOTES:
        assert not report.findings, str(report)
        assert rule in {note.rule for note in report.notes}, str(report)
    else:
        assert [finding.rule for finding in report.findings[:1]] == [rule], str(report)
    assert str(report) == LOADED[rule].MESSAGES[name]


@pytest.mark.parametrize(("rule", "name"), loops("healthy"))
def test_healthy_twin_is_left_alone(rule: str, name: str) -> None:
    """The same loop without the mistake passes."""
    assert_silent(rule, name, report_of(LOADED[rule].healthy()[name]))


@pytest.mark.parametrize(("rule", "name"), loops("near_misses"))
def test_near_miss_is_left_alone(rule: str, name: str) -> None:
    """A correct loop that looks like the mistake passes."""
    assert_silent(rule, name, report_of(LOADED[rule].near_misses()[name]))


def of_the_scaler(rule: str, name: str) -> bool:
    """Tell whether a loop ends with an error of its GradScaler."""
    return "the GradScaler raised at" in LOADED[rule].MESSAGES.get(name, "")


RAISED = [parameter for parameter in loops("buggy") if of_the_scaler(*parameter.values)]


@pytest.mark.parametrize(("rule", "name"), RAISED)
def test_a_scalers_error_is_the_cause(rule: str, name: str) -> None:
    """CheckFailed comes from the scaler's error, with one finding, and nothing spurious beside it."""
    with pytest.raises(CheckFailed) as caught:
        assert_mixed_precision_training(**LOADED[rule].buggy()[name])
    assert [finding.rule for finding in caught.value.findings] == [rule]
    assert caught.value.report.notes == ()
    assert type(caught.value.__cause__) in (RuntimeError, AssertionError, ValueError)


@pytest.mark.parametrize("rule", LOADED)
def test_a_rule_can_be_allowed(rule: str) -> None:
    """``allow`` leaves out the rule of a buggy loop, a finding or a note; an error of the GradScaler passes through."""
    for name, case in LOADED[rule].buggy().items():
        if of_the_scaler(rule, name):
            with pytest.raises((RuntimeError, AssertionError, ValueError)):
                report_of(case, allow=[rule])
        else:
            rest = report_of(case, allow=[rule])
            assert rule not in {one.rule for one in (*rest.findings, *rest.notes)}


def lacking(rule: str, cases: Path) -> list[str]:
    """List what a rule has not: a case file, each of its parts, a twin and a message for each of its buggy loops."""
    path = case_path(cases, rule)
    if not path.exists():
        return [f"the file {path.name}"]
    module = load_case(path)
    needed = ("buggy", "healthy", "near_misses", "MESSAGES")
    lacks = [f"{name} in {path.name}" for name in needed if not hasattr(module, name)]
    if lacks:
        return lacks
    twins = module.healthy()
    lacks += [f"a twin of {name!r} in {path.name}" for name in module.buggy() if name not in twins]
    for name in module.buggy():
        if not re.search(rf"^\[{re.escape(rule)}\] ", module.MESSAGES.get(name, ""), re.MULTILINE):
            lacks.append(f"a message of {name!r} in {path.name}")
    known = {*twins, *module.near_misses()}
    lacks += [f"a loop named {name!r} in {path.name}" for name in getattr(module, "NOTED", {}) if name not in known]
    if len(module.near_misses()) < 2:
        lacks.append(f"two near misses in {path.name}")
    return lacks


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_its_loops(rule: str) -> None:
    """Every rule has buggy loops, each with a healthy twin and a message, and near misses."""
    assert lacking(rule, CASES) == []


def test_every_case_belongs_to_a_rule() -> None:
    """No case file is left of a rule that is gone."""
    assert {path.name for path in CASES.glob("*.py")} == {case_path(CASES, rule).name for rule in RULES}


def test_what_a_rule_lacks_is_seen(tmp_path: Path) -> None:
    """The test above notices a missing file, missing parts, a bug without a twin, and another rule's message."""
    assert lacking("some-rule", tmp_path) == ["the file some_rule.py"]
    case_path(tmp_path, "some-rule").write_text("def buggy(): return {'a': {}, 'b': {}}\n", encoding="utf-8")
    assert lacking("some-rule", tmp_path) == [
        "healthy in some_rule.py",
        "near_misses in some_rule.py",
        "MESSAGES in some_rule.py",
    ]
    case_path(tmp_path, "some-rule").write_text(
        "def buggy(): return {'a': {}, 'b': {}}\n"
        "def healthy(): return {'b': {}}\n"
        "def near_misses(): return {'c': {}}\n"
        "MESSAGES = {'a': '[some-rule] seen', 'b': '[other-rule] seen'}\n"
        "NOTED = {'b': ('static-scale',), 'd': ('static-scale',)}\n",
        encoding="utf-8",
    )
    assert lacking("some-rule", tmp_path) == [
        "a twin of 'a' in some_rule.py",
        "a message of 'b' in some_rule.py",
        "a loop named 'd' in some_rule.py",
        "two near misses in some_rule.py",
    ]
