"""What the resume check says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tl_core import Report
from tl_resume._check._evidence import Evidence
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


def losses_table(evidence: Evidence) -> str:
    """Show the losses of both runs around the step at which they part: the loss that parts, else the main one."""
    found = evidence.diverged
    assert found is not None
    full, back = evidence.full.trace, evidence.resumed.run.trace
    if found.state is not None or not any(map(full.losses, full.steps)):
        return ""
    figure = found.figure
    name = figure.what if figure is not None and figure.is_loss else full.main_loss
    first = max(evidence.resume_at - 1, found.step - 3)
    rows = [("step", "uninterrupted", "resumed")]
    for step in full.steps[first : found.step + 4]:
        if step in back.steps:
            resumed = f"{back.losses(step).get(name, math.nan):.6g}"
        elif step < evidence.resume_at:
            resumed = "(saved after it)"
        else:
            resumed = "(raised)" if step == found.step else ""
        rows.append((str(step), f"{full.losses(step).get(name, math.nan):.6g}", resumed))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return f"{name}:\n" + "\n".join(f"  {line.rstrip()}" for line in lines)


ResumeReport.__module__ = "tl_resume"
