"""The telemetry table: one row a step, long runs folded around what matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tl_telemetry._record import StepRecord, total

# Runs up to this long are shown whole.
WHOLE = 12
# Rows around a telling step, at the start and at the end.
CONTEXT = 1
ENDS = 2
# With more optimizers than this, a column sums over all of them.
MAX_OPTIMIZER_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, a step's cell, and the figure by which folded rows give a range (None: no range).

    ``spare`` columns may be left out where there is no room for them, those of 1 first; 0 stays.
    """

    title: str
    cell: Callable[[StepRecord], str]
    value: Callable[[StepRecord], float | None] | None = None
    spare: int = 0


def render(records: Sequence[StepRecord], around: Collection[int] | None = None, width: int | None = None) -> str:
    """Return the table as text.

    Args:
        records: the run's records.
        around: telling steps; a long run is folded around them, its ends and its extremes. None tells nothing.
        width: columns of text at the most, where leaving out what is least needed can do it.
    """
    if not records:
        return "  (no step was recorded)"
    columns = [column for column in _columns(records) if any(column.cell(record) != "-" for record in records)]
    text = _laid_out(columns, records, around)
    for needless in ([c for c in columns if c.spare == 1], [c for c in columns if c.spare == 2]):
        if width is None or max(map(len, text.splitlines())) <= width:
            break
        columns = [column for column in columns if column not in needless]
        text = _laid_out(columns, records, around)
    return text


def _laid_out(columns: list[Column], records: Sequence[StepRecord], around: Collection[int] | None) -> str:
    rows = [[column.title for column in columns]]
    for block in _folded(records, around):
        if len(block) == 1:
            rows.append([column.cell(block[0]) for column in columns])
        else:
            rows.append([_range(column, block) for column in columns])
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _columns(records: Sequence[StepRecord]) -> list[Column]:
    columns = [Column("step", lambda r: str(r.step))]
    losses = list(dict.fromkeys(name for record in records for name in record.losses))
    for name in losses:
        further = any(record.losses and name != record.main_loss for record in records)
        columns.append(_figure(name, lambda r, name=name: r.losses.get(name), spare=int(further)))  # type: ignore[misc]
    names = list(dict.fromkeys(name for record in records for name in record.optimizer_steps))
    groups = (
        [(name, [name]) for name in names] if len(names) <= MAX_OPTIMIZER_COLUMNS else [(f"all {len(names)}", names)]
    )
    for label, members in groups:
        suffix = f" {label}" if len(names) > 1 else ""
        columns += _optimizer_columns(suffix, members)
    columns.append(_figure("scale", lambda r: r.loss_scale))
    return columns


def _optimizer_columns(suffix: str, names: list[str]) -> list[Column]:
    def over(figures: dict[str, float]) -> float | None:
        present = [figures[name] for name in names if name in figures]
        return total(present) if present else None

    def norm_cell(record: StepRecord) -> str:
        before, after = over(record.grad_norm_before_clip), over(record.grad_norm)
        if before is None or after is None:
            return "-"
        # a clip below its bound multiplies by 1 (up to rounding)
        same = before == after or math.isnan(after) or math.isclose(before, after, rel_tol=1e-4)
        return _shown(after) if same else f"{_shown(before)} → {_shown(after)}"

    def lr_cell(record: StepRecord) -> str:
        rates = dict.fromkeys(lr for name in names for lr in record.lrs.get(name, ()))
        shown = [f"{lr:.4g}" for lr in rates]
        return ",".join(shown[:4]) + (",..." if len(shown) > 4 else "") if shown else "-"

    def num_steps(record: StepRecord) -> int:
        return sum(record.optimizer_steps.get(name, 0) for name in names)

    return [
        Column(f"grad norm{suffix}", norm_cell, lambda r: over(r.grad_norm_before_clip)),
        _figure(f"update{suffix}", lambda r: over(r.update_norm), spare=2),
        Column(f"lr{suffix}", lr_cell, lambda r: max((lr for n in names for lr in r.lrs.get(n, ())), default=None)),
        _figure(f"opt steps{suffix}", num_steps),
    ]


def _figure(title: str, value: Callable[[StepRecord], float | None], spare: int = 0) -> Column:
    def cell(record: StepRecord) -> str:
        figure = value(record)
        return "-" if figure is None else _shown(figure)

    return Column(title, cell, value, spare)


def _shown(figure: float) -> str:
    return f"{figure:.4g}"


def _range(column: Column, block: Sequence[StepRecord]) -> str:
    if column.value is None:  # the step itself
        return f"{block[0].step}-{block[-1].step}"
    figures = [figure for record in block if (figure := column.value(record)) is not None]
    if not figures:
        return "-"
    numbers = [figure for figure in figures if not math.isnan(figure)]
    shown = [_shown(min(numbers)), _shown(max(numbers))] if numbers else []
    ends = list(dict.fromkeys(shown + ["nan"] * (len(numbers) < len(figures))))
    return " .. ".join(ends)


def _folded(records: Sequence[StepRecord], around: Collection[int] | None) -> list[list[StepRecord]]:
    """Return the rows: single records, and runs of records that are shown as one."""
    if len(records) <= WHOLE:
        return [[record] for record in records]
    last = len(records) - 1
    shown = {*range(ENDS), *range(last - ENDS + 1, last + 1), *_extremes(records)}
    positions = {record.step: position for position, record in enumerate(records)}
    for step in around or ():
        if step in positions:
            shown.update(range(max(0, positions[step] - CONTEXT), min(last, positions[step] + CONTEXT) + 1))
    blocks: list[list[StepRecord]] = []
    hidden: list[StepRecord] = []
    for position, record in enumerate(records):
        if position not in shown:
            hidden.append(record)
            continue
        if hidden:
            # one or two rows are not worth a fold
            blocks += [hidden] if len(hidden) > 2 else [[record] for record in hidden]
            hidden = []
        blocks.append([record])
    return blocks


def _extremes(records: Sequence[StepRecord]) -> set[int]:
    """Return the positions of the largest losses and gradient norms, and of the first ones that are not finite.

    They are shown even where a run is folded.
    """
    extremes: set[int] = set()
    losses = [list(record.losses.values()) for record in records]
    norms = [list(record.grad_norm_before_clip.values()) for record in records]
    for figures in (losses, norms):
        broken = [position for position, row in enumerate(figures) if not all(map(math.isfinite, row))]
        finite = {position: max(filter(math.isfinite, row), default=None) for position, row in enumerate(figures)}
        known = {position: value for position, value in finite.items() if value is not None}
        extremes.update(broken[:1], [max(known, key=known.__getitem__)] if known else [])
    return extremes
