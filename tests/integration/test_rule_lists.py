"""The READMEs and the page of rules list every rule, findings and notes apart."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "tl-telemetry" / "README.md"


def listed(text: str, section: str = "Rules") -> tuple[set[str], set[str]]:
    """Return the rules of the two tables of a section: findings, and notes."""
    tables = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0].split("\nNotes, ")
    findings, notes = (
        {rule for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for rule in re.findall(r"`(.+?)`", row)}
        for table in tables
    )
    return findings, notes


def test_the_readme_lists_every_rule():
    """Its tables hold the ids of the findings and of the notes, no more and no fewer."""
    tl_telemetry = pytest.importorskip("tl_telemetry")
    assert listed(README.read_text()) == (set(tl_telemetry.FINDINGS), set(tl_telemetry.NOTES))


def test_a_rule_that_is_not_listed_is_seen():
    """Only ids in the first column of the tables count."""
    text = (
        "`a`\n## Rules\n| rule | sees |\n| --- | --- |\n| `b`, `c-d` | what `e` is |\n\nNotes, which\n\n| `f` | g |\n"
    )
    assert listed(text) == ({"b", "c-d"}, {"f"})


COVERAGE = Path(__file__).parents[2] / "packages" / "tl-coverage"
RULES_PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
COVERAGE_TESTS = Path(__file__).parents[1] / "tl_coverage"


def emitted(sources: list[str]) -> set[str]:
    """Return the rule ids with which sources make findings: the first argument, or ``rule=``."""
    ids = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "rule")]
                ids.update(one.value for one in given if isinstance(one, ast.Constant))
    return ids


def test_every_static_rule_has_an_entry_and_a_test():
    """Each rule id of tl-coverage stands on the rules' page, in the package's README, and in its tests."""
    ids = emitted([path.read_text() for path in (COVERAGE / "src").rglob("*.py")]) - {"not-judged"}
    page, readme = RULES_PAGE.read_text(), (COVERAGE / "README.md").read_text()
    tests = "".join(path.read_text() for path in COVERAGE_TESTS.glob("test_*.py"))
    assert len(ids) > 5
    lacking = [one for one in sorted(ids) if f"### {one} (static)\n" not in page or f"`{one}`" not in readme]
    assert lacking + [one for one in sorted(ids) if f'"{one}"' not in tests and f"[{one}]" not in tests] == []


def test_ids_are_read_off_the_calls():
    """A rule id counts wherever a finding is made, by position or by name."""
    assert emitted(['Finding("a-b", "seen")', 'x = [Finding(rule="c-d", seen="s")]', 'Other("e-f")']) == {"a-b", "c-d"}


RESUME = Path(__file__).parents[2] / "packages" / "tl-resume"


def contents(page: str, check: str) -> tuple[list[str], list[str]]:
    """Return the rules that the page's contents list for a check: findings, and notes."""
    lines = page.partition(f"\nOf the [{check}](#the-{check.replace(' ', '-')}):\n\n")[2].partition("\n\n")[0]
    # a rule that another check has too is written `name (check)`
    found = re.findall(r"^- \[(\S+?)( \([a-z ]+\))?\]\(#(\S+?)\)( \(note\))?$", lines, re.MULTILINE)
    anchors = [name + re.sub(r" \((.+)\)", r" \1", of).replace(" ", "-") for name, of, _, _ in found]
    assert anchors == [anchor for _, _, anchor, _ in found]
    found = [(name, anchor, note) for name, _, anchor, note in found]
    return [name for name, _, note in found if not note], [name for name, _, note in found if note]


def test_every_rule_of_the_resume_check_is_listed():
    """Its README's tables and the page's contents hold its ids, findings and notes apart; the page in their order."""
    ids = pytest.importorskip("tl_resume._check._rule_ids")
    findings, notes = ids.RESUME_FINDINGS, ids.RESUME_NOTES
    assert listed((RESUME / "README.md").read_text(), "Rules of the resume check") == (set(findings), set(notes))
    assert contents(RULES_PAGE.read_text(), "resume check") == (list(findings), list(notes))
    section = RULES_PAGE.read_text().partition("\n## The resume check\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\S+)", section, re.MULTILINE) == [*findings, *notes]


def test_every_finding_of_the_resume_check_has_a_listed_id():
    """What its sources give as a rule's id is in the list."""
    ids = pytest.importorskip("tl_resume._check._rule_ids")
    given = emitted([path.read_text() for path in (RESUME / "src" / "tl_resume" / "_check").rglob("*.py")])
    assert len(given) > 5
    assert given <= {*ids.RESUME_FINDINGS, *ids.RESUME_NOTES}


CRASH_TESTS = Path(__file__).parents[1] / "tl_resume"


def rule_constants(sources: list[str]) -> set[str]:
    """Return the rule ids that modules hold in constants: capitals whose value is words joined by hyphens."""
    ids = set()
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and all(name.isupper() for name in _names(node.targets)):
                values = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                ids.update(one for one in values if isinstance(one, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+", one))
    return ids


def _names(targets: list[ast.expr]) -> list[str]:
    return [one.id.strip("_") for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def untested(ids: set[str], tests: str) -> list[str]:
    """Return the rules that no test names."""
    return [one for one in sorted(ids) if f'"{one}"' not in tests and f"[{one}]" not in tests]


def test_every_rule_of_the_crash_check_is_listed_and_tested():
    """Its README's tables, the page's contents and entries hold its ids, and its tests name each."""
    check = pytest.importorskip("tl_resume._crash._check")
    findings, notes = check.CRASH_FINDINGS, check.CRASH_NOTES
    assert listed((RESUME / "README.md").read_text(), "Rules of the crash check") == (set(findings), set(notes))
    assert contents(RULES_PAGE.read_text(), "crash check") == (list(findings), list(notes))
    section = RULES_PAGE.read_text().partition("\n## The crash check\n")[2].partition("\n## ")[0]
    assert [*re.findall(r"^### (\S+)", section, re.MULTILINE), "not-judged"] == [*findings, *notes]
    tests = "".join(path.read_text() for path in CRASH_TESTS.glob("test_crash_*.py"))
    assert untested({*findings, *notes}, tests) == []


def test_every_finding_of_the_crash_check_has_a_listed_id():
    """What its sources hold or give as a rule's id is in the list."""
    check = pytest.importorskip("tl_resume._crash._check")
    sources = [path.read_text() for path in (RESUME / "src" / "tl_resume" / "_crash").rglob("*.py")]
    given = emitted(sources) | rule_constants(sources)
    assert len(given) > 5
    assert given <= {*check.CRASH_FINDINGS, *check.CRASH_NOTES}


def test_a_rule_of_the_crash_check_that_is_forgotten_is_seen():
    """Constants count, alone or several at once, and a rule is tested where a test names it whole."""
    assert rule_constants(['A, B = ("a-b", "c-d")\n_LOST = "x-y"\nnot_one = "d-e"\nTEXT = "two words"']) == {
        *("a-b", "c-d", "x-y")
    }
    assert untested({"a-b", "c-d", "e-f"}, 'rule == "a-b"; "[c-d] seen"; "e-f-g"') == ["e-f"]


# Of each check whose rules are a package's: its name on the rules' page, and what its constants begin with.
CHECKS = {"tl_accum": ("accumulation check", "ACCUM"), "tl_amp": ("mixed-precision check", "AMP")}


def rule_ids(package: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    module = pytest.importorskip(package)
    prefix = CHECKS[package][1]
    return getattr(module, f"{prefix}_FINDINGS"), getattr(module, f"{prefix}_NOTES")


@pytest.mark.parametrize("package", CHECKS)
def test_every_rule_of_a_package_is_listed(package: str):
    """Its README's tables, the page's contents and the page's entries hold its ids, the page in their order."""
    findings, notes = rule_ids(package)
    check = CHECKS[package][0]
    readme = Path(__file__).parents[2] / "packages" / package.replace("_", "-") / "README.md"
    assert listed(readme.read_text(), f"Rules of the {check}") == (set(findings), set(notes))
    assert contents(RULES_PAGE.read_text(), check) == (list(findings), list(notes))
    section = RULES_PAGE.read_text().partition(f"\n## The {check}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\S+)", section, re.MULTILINE) == [*findings, *notes]


@pytest.mark.parametrize("package", CHECKS)
def test_every_finding_of_a_package_has_a_listed_id(package: str):
    """What its sources give as a rule's id is in the list."""
    findings, notes = rule_ids(package)
    source = Path(__file__).parents[2] / "packages" / package.replace("_", "-") / "src"
    given = emitted([path.read_text() for path in source.rglob("*.py")])
    assert len(given) > 5
    assert given <= {*findings, *notes}


def without_case(ids: set[str], folder: Path) -> list[str]:
    """Return the rules that have no loops of their own below a folder, and that no test in it names."""
    files = list(folder.rglob("*.py"))
    named = untested(ids, "".join(path.read_text() for path in files))
    return [one for one in named if one.replace("-", "_") not in {path.stem for path in files}]


@pytest.mark.parametrize("package", CHECKS)
def test_every_rule_of_a_package_has_a_case(package: str):
    """Each rule has a file of loops, or a test that names it."""
    findings, notes = rule_ids(package)
    assert without_case({*findings, *notes}, Path(__file__).parents[1] / package) == []


def test_a_rule_without_a_case_is_seen(tmp_path: Path):
    """A file by the rule's name counts, and so does a test that names the rule whole."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "a_b.py").touch()
    (tmp_path / "test_it.py").write_text('assert rule == "c-d"')
    assert without_case({"a-b", "c-d", "e-f", "b"}, tmp_path) == ["b", "e-f"]


def test_contents_are_read_by_check():
    """Only the lines below the check's name count, a note is told from a finding, and the two names of a line agree."""
    lines = "- [a-b](#a-b)\n- [c (mixed precision)](#c-mixed-precision) (note)\n"
    page = f"- [z](#z)\n\nOf the [some check](#the-some-check):\n\n{lines}\n- [d](#d)\n"
    assert contents(page, "some check") == (["a-b"], ["c"])
    with pytest.raises(AssertionError):
        contents(page.replace("(#a-b)", "(#b-a)"), "some check")
