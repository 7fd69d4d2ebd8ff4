"""The rules: functions of both runs, causes before their consequences."""

from __future__ import annotations

from tl_accum._rules.gradients import gradient_findings
from tl_accum._rules.last_group import last_group
from tl_accum._rules.notes import notes
from tl_accum._rules.state import moved_between, state_findings
from tl_accum._rules.timing import check_reference, timing_findings

__all__ = [
    "check_reference",
    "gradient_findings",
    "last_group",
    "moved_between",
    "notes",
    "state_findings",
    "timing_findings",
]
