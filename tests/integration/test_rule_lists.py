"""The README of tl-telemetry lists every rule, findings and notes apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "tl-telemetry" / "README.md"


def listed(text: str) -> tuple[set[str], set[str]]:
    """Return the rules of the two tables under "Rules": findings, and notes."""
    tables = text.partition("\n## Rules\n")[2].split("\nNotes, ")
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
