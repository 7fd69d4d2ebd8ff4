"""What the accumulation check says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tl_accum._compare import Comparison
from tl_accum._differences import GroupGap
from tl_accum._runs import MicroStep
from tl_accum._updates import updates
from tl_accum._vectors import dot, norm, only
from tl_accum._words import cycle
from tl_core import Report

MAX_ROWS = 12
# Gradients whose cosine is below this point elsewhere, and are no multiples.
TURNED = 0.999


@dataclass
class AccumulationReport(Report):
    """The verdict of the accumulation check, with what it was told from.

    Attributes:
        accumulation_steps: micro-batches in a cycle.
        cycles: how many groups of micro-batches were fed, incomplete ones too.
        diverged_at: the first group, from 0, in which accumulation differs from the full batch; None where none does.
        noise: how far the loop lies from itself when it is repeated, relative to its largest gradient; 0 where it
            repeats exactly, or where that was not needed.
        data_form: what data was taken for.
    """

    accumulation_steps: int = 0
    cycles: int = 0
    diverged_at: int | None = None
    noise: float = 0.0
    data_form: str = ""


AccumulationReport.__module__ = "tl_accum"


def tables(comparison: Comparison) -> str:
    """Show the first group that differs: what acted in each micro-batch, and the norms of the gradients."""
    gap = next((gap for gap in comparison.gaps if not gap.agrees), None)
    if gap is None:
        return ""
    return "\n\n".join(filter(None, [_acts(comparison, gap), _norms(comparison, gap)]))


def _acts(comparison: Comparison, gap: GroupGap) -> str:
    plan = comparison.plan
    group = plan.groups[gap.number]
    rows = [("step", "micro-batch", "acts")]
    full = comparison.reference.groups[gap.number].steps[0]
    for place, step in enumerate(comparison.run.groups[gap.number].steps):
        rows.append((str(step.index), f"{place + 1} of {len(group.parts)}", _acts_of(comparison, step)))
    rows.append(("", "full batch", _acts_of(comparison, full)))
    return _table(f"What acted in {cycle(plan, group)}:", rows)


def _acts_of(comparison: Comparison, step: MicroStep) -> str:
    is_named = len(comparison.run.setup.optimizers) > 1
    acts = []
    for event in step.record.events:
        if event.kind != "warning":
            name = getattr(event, "optimizer", None) if is_named else None
            acts.append(event.kind.replace("_", " ") + (f" {name!r}" if name else ""))
    return ", ".join(acts) or "nothing"


def _norms(comparison: Comparison, gap: GroupGap) -> str:
    if not gap.gradients or gap.timing:  # beside other updates, they are those of other weights
        return ""
    rows: list[tuple[str, ...]] = [("parameter", "full batch", "accumulated", "ratio", "cosine")]
    differing = [(one, parameter.name) for one in gap.gradients for parameter in one.parameters]
    turned = False
    for one, name in differing[:MAX_ROWS]:
        a, b = (only(vector, [name]) for vector in one.vectors)
        expected, got = norm(a), norm(b)
        cosine = dot(a, b) / expected / got if expected and got else None
        turned = turned or (cosine is not None and cosine < TURNED)
        ratio = f"{got / expected:.4g}" if expected else "-"
        rows.append((name, f"{expected:.4g}", f"{got:.4g}", ratio, "-" if cosine is None else f"{cosine:.4g}"))
    if len(differing) > MAX_ROWS:
        rows.append((f"({len(differing) - MAX_ROWS} more)", "", "", "", ""))
    if not turned:
        rows = [row[:-1] for row in rows]
    made = updates(comparison.reference, comparison.reference.groups[gap.number])
    clips = any(update.clips for found in made.values() for update in found)
    when = "before clipping" if clips and gap.gradients[0].before_clipping else "as applied"
    return _table(f"Gradients {when} (L2 norms):", rows)


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])
