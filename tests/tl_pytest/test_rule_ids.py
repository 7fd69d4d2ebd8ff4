"""The plugin's list of rules, which it reads without torch, is that of the checks.

`python tests/tl_pytest/test_rule_ids.py` writes the list anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import tl_accum
import tl_amp
import tl_telemetry
from tl_pytest._rule_ids import RULES
from tl_resume._check._rule_ids import RESUME_FINDINGS, RESUME_NOTES
from tl_resume._crash._check import CRASH_FINDINGS

MODULE = Path(__file__).parents[2] / "packages" / "tl-pytest" / "src" / "tl_pytest" / "_rule_ids.py"


def collected() -> dict[str, tuple[str, ...]]:
    """Collect the rules that each check's ``allow`` knows; the rules of the static coverage check are found by name."""
    return {
        "coverage": (*tl_telemetry.FINDINGS[:6], "decayed-parameter", "undecayed-parameter", "frozen-parameter"),
        "run": (*tl_telemetry.FINDINGS, *tl_telemetry.NOTES),
        "resume": (*RESUME_FINDINGS, *RESUME_NOTES),
        "crash": tuple(CRASH_FINDINGS),
        "accumulation": (*tl_accum.ACCUM_FINDINGS, *tl_accum.ACCUM_NOTES),
        "mixed precision": (*tl_amp.AMP_FINDINGS, *tl_amp.AMP_NOTES),
    }


def text() -> str:
    lines = [
        '"""The rules that the checks can be told to allow; they are asked for before torch may be imported.',
        "",
        "Written by `python tests/tl_pytest/test_rule_ids.py`.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "RULES: dict[str, tuple[str, ...]] = {",
    ]
    for check, rules in collected().items():
        lines += [f'    "{check}": (', *(f'        "{rule}",' for rule in rules), "    ),"]
    return "\n".join([*lines, "}", ""])


def test_the_list_is_that_of_the_checks():
    """Each check's rules are listed; `python tests/tl_pytest/test_rule_ids.py` writes the list anew."""
    assert collected() == RULES
    assert MODULE.read_text() == text()


@pytest.mark.parametrize("check", ["resume", "run", "accumulation", "mixed precision"])
def test_a_check_can_be_allowed_its_notes(check):
    """What a check could not judge can be allowed by name in all checks but that of crashes."""
    assert "not-judged" in RULES[check]
    assert "not-judged" not in RULES["crash"]


if __name__ == "__main__":
    MODULE.write_text(text())
    print(f"wrote {MODULE}")
