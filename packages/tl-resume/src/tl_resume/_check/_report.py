"""What the resume check says."""

from __future__ import annotations

from dataclasses import dataclass

from tl_core import Report
from tl_telemetry import StateDifference


@dataclass
class ResumeReport(Report):
    """The verdict of the resume check, with what it was told from.

    Attributes:
        resume_at: the step before which was saved, and from which the resumed run went on.
        continuous: the main loss of every step of the uninterrupted run.
        resumed: the main loss of every step of the resumed run, from ``resume_at`` on.
        state_differences: what differed between the state when saved and right after loading, whether it matters or
            not.
        diverged_at: the first step in which the resumed run parts from the uninterrupted one; None where none does.
        cost: how much was run, in runs of the whole loop.
    """

    resume_at: int = 0
    continuous: tuple[float, ...] = ()
    resumed: tuple[float, ...] = ()
    state_differences: tuple[StateDifference, ...] = ()
    diverged_at: int | None = None
    cost: float = 0.0


ResumeReport.__module__ = "tl_resume"
