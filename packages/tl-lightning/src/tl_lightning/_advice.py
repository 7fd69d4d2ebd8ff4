"""What to change where the code that saves and loads is Lightning's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tl_resume import ResumeReport

_FIXES = {
    "rng-not-restored": "Lightning's checkpoints hold no random state: save it in a callback's state_dict() and put it "
    "back in its on_train_start(), or resume at the end of an epoch whose data need none",
    "data-position-not-restored": "resume at the end of an epoch, or give the Trainer a loader with state_dict() and "
    "load_state_dict(), torchdata's StatefulDataLoader",
    "state-not-restored": "give the callback state_dict() and load_state_dict(), which Lightning saves and restores; "
    "in the module, register a buffer, or use on_save_checkpoint() and on_load_checkpoint()",
}


def advised(report: ResumeReport) -> ResumeReport:
    """Return the report with fixes that can be made around a Trainer."""
    findings = tuple(replace(one, fix=_FIXES.get(one.rule, one.fix)) for one in report.findings)
    return replace(report, findings=findings)
