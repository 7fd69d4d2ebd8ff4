"""What to change where the code that saves and loads is Lightning's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tl_resume import ResumeReport

_FIXES = {
    "rng-not-restored": "Lightning's checkpoints hold no random state: draw what a step draws from its number, with "
    "torch.manual_seed(seed + trainer.global_step) in on_train_batch_start(), or keep the generators' states in a "
    "callback's state_dict()",
    "data-position-not-restored": "give the loader an order that a new process finds again (a sampler with "
    "set_epoch(), which Lightning calls), and a position: torchdata's StatefulDataLoader has one, any other loader can "
    "only be resumed at the end of an epoch",
    "state-not-restored": "give the callback state_dict() and load_state_dict(), which Lightning saves and restores; "
    "in the module, register a buffer, or use on_save_checkpoint() and on_load_checkpoint()",
}


def advised(report: ResumeReport) -> ResumeReport:
    """Return the report with fixes that can be made around a Trainer."""
    findings = tuple(replace(one, fix=_FIXES.get(one.rule, one.fix)) for one in report.findings)
    return replace(report, findings=findings)
