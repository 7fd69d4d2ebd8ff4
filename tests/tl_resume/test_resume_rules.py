"""Every rule of the resume check on a buggy loop, on the loop's healthy twin, and on correct loops that tempt it.

The loops of a rule are in ``resume_cases/<rule_id with underscores>.py``. Such a file has

- ``buggy()`` and ``healthy()``, which differ by one line: the arguments of ``check_resume_equivalent``;
- ``MESSAGE``, the whole text that the buggy loop gets;
- ``near_misses()``, further correct loops by name.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tl_core import Report
from tl_resume import check_resume_equivalent
from tl_resume._check._rule_ids import RESUME_FINDINGS, RESUME_NOTES

CASES = Path(__file__).parent / "resume_cases"
DOCS = Path(__file__).parents[2] / "docs" / "rules.md"
RULES = (*RESUME_FINDINGS, *RESUME_NOTES)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"resume_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a spawned process is told of functions by their module
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


@cache
def buggy_report(rule: str) -> Report:
    return check_resume_equivalent(**LOADED[rule].buggy())


def assert_silent(report: Report, rule: str) -> None:
    assert report.findings == (), str(report)
    assert report.judged, str(report)
    if rule in RESUME_NOTES:
        assert rule not in {note.rule for note in report.notes}, str(report)


@pytest.mark.parametrize("rule", LOADED)
def test_buggy_loop_is_named_first_and_in_full(rule: str) -> None:
    """A rule's buggy loop gets its finding before any other, or its note, with the whole message."""
    report = buggy_report(rule)
    if rule in RESUME_NOTES:
        assert report.findings == (), str(report)
        chosen = [note for note in report.notes if note.rule == rule]
    else:
        chosen = list(report.findings)
    assert chosen, str(report)
    assert str(chosen[0]) == LOADED[rule].MESSAGE


@pytest.mark.parametrize("rule", LOADED)
def test_healthy_twin_is_left_alone(rule: str) -> None:
    """The same loop without the mistake gets no finding, and not the rule's note."""
    assert_silent(check_resume_equivalent(**LOADED[rule].healthy()), rule)


@pytest.mark.parametrize(("rule", "name"), NEAR_MISSES)
def test_near_miss_is_left_alone(rule: str, name: str) -> None:
    """A correct loop that looks like the mistake gets no finding, and not the rule's note."""
    assert_silent(check_resume_equivalent(**LOADED[rule].near_misses()[name]), rule)


@pytest.mark.parametrize("rule", LOADED)
def test_a_rule_can_be_allowed(rule: str) -> None:
    """``allow`` leaves out the rule of the buggy loop, a finding or a note, and nothing else."""
    everything = buggy_report(rule)
    rest = check_resume_equivalent(**LOADED[rule].buggy(), allow=[rule])
    assert [str(f) for f in rest.findings] == [str(f) for f in everything.findings if f.rule != rule]
    assert [str(n) for n in rest.notes] == [str(n) for n in everything.notes if n.rule != rule]


def lacking(rule: str, cases: Path, docs: str) -> list[str]:
    """List what a rule has not: a case file, each of its parts, an entry in the docs."""
    path = case_path(cases, rule)
    lacks = []
    if not path.exists():
        lacks.append(f"the file {path.name}")
    else:
        module = load(path)
        parts = ("buggy", "healthy", "near_misses", "MESSAGE")
        lacks += [f"{name} in {path.name}" for name in parts if not hasattr(module, name)]
        if not getattr(module, "MESSAGE", f"[{rule}]").startswith(f"[{rule}]"):
            lacks.append(f"a MESSAGE of its own in {path.name}")
    if not re.search(rf"^### {re.escape(rule)}(?: \(resume\))?$", docs, re.MULTILINE):
        lacks.append(f"the entry `### {rule}` in docs/rules.md")
    return lacks


def resume_part(docs: str) -> str:
    """Return the section of the page that tells of this check's rules."""
    return docs.partition("\n## The resume check\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_its_loops_and_its_entry(rule: str) -> None:
    """Every rule has a buggy loop, a healthy twin, near misses, a message and an entry in the docs."""
    assert lacking(rule, CASES, resume_part(DOCS.read_text(encoding="utf-8"))) == []


def test_every_case_belongs_to_a_rule() -> None:
    """No case file is left of a rule that is gone."""
    assert {path.name for path in CASES.glob("*.py")} == {case_path(CASES, rule).name for rule in RULES}


def test_what_a_rule_lacks_is_seen(tmp_path: Path) -> None:
    """The test above notices a missing file, a missing part, another rule's message and a missing entry."""
    assert lacking("some-rule", tmp_path, "") == [
        "the file some_rule.py",
        "the entry `### some-rule` in docs/rules.md",
    ]
    (tmp_path / "some_rule.py").write_text("MESSAGE = '[other-rule] ...'\n\n\ndef buggy(): ...\n", encoding="utf-8")
    docs = "## The resume check\n\n### some-rule\n\n### some-rule-too\n"
    assert lacking("some-rule", tmp_path, docs) == [
        "healthy in some_rule.py",
        "near_misses in some_rule.py",
        "a MESSAGE of its own in some_rule.py",
    ]
    page = f"# Rules\n\n{docs}\n## The crash check\n\n### other-rule\n"
    assert lacking("other-rule", tmp_path, resume_part(page))[1:] == ["the entry `### other-rule` in docs/rules.md"]
