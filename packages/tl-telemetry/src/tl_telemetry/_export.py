"""Records as plain rows, for pandas and JSON Lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tl_telemetry._record import StepRecord


def rows(records: Sequence[StepRecord], *, parameters: bool = False) -> list[dict[str, Any]]:
    """Return one flat dict a step: ``step``, ``loss``, ``loss.<name>``, ``grad_norm.<optimizer>``, ...

    Args:
        records: the run's records.
        parameters: add the per-parameter figures under ``parameters``, with every non-finite figure as a string
            (``"nan"``, ``"inf"``), as JSON has no numbers for them.
    """
    return [_plain(_row(record, parameters)) if parameters else _row(record, parameters) for record in records]


def _row(record: StepRecord, parameters: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"step": record.step, "num_examples": record.num_examples, "loss": record.loss}
    row.update({f"loss.{name}": value for name, value in record.losses.items()})
    for name, count in record.optimizer_steps.items():
        row[f"grad_norm_before_clip.{name}"] = record.grad_norm_before_clip.get(name)
        row[f"grad_norm.{name}"] = record.grad_norm.get(name)
        row[f"update_norm.{name}"] = record.update_norm.get(name)
        row.update({f"lr.{name}.{group}": lr for group, lr in enumerate(record.lrs.get(name, ()))})
        row[f"optimizer_steps.{name}"] = count
    row["skipped"] = record.skipped
    row["loss_scale"] = record.loss_scale
    row["nonfinite_grads"] = list(record.nonfinite_grads)
    row["events"] = [event.kind for event in record.events]
    if parameters:
        row["parameters"] = {name: asdict(figures) for name, figures in record.parameters.items()}
    return row


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
