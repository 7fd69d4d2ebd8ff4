"""What callbacks export into the checkpoint, and whether it comes back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
from torch import Tensor
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from tl_core import Finding, noted
from tl_hf._setup import named, own_callbacks

if TYPE_CHECKING:
    from tl_resume import ResumeReport

PLAINLY = (
    'as plain data: under "attributes" what is set as it is, and under "args" what __init__ takes and makes something '
    "of (a tensor, which tolist() makes a list of, comes back as that list)"
)
_PLAIN = (bool, int, float, str, type(None))


class Exported:
    """The states that callbacks export: when the checkpoint was written, and in the first Trainer that resumed."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None

    def saved(self, trainer: Trainer) -> None:
        """Keep what is exported now, at the checkpoint."""
        self._saved = _states(trainer)

    def loaded(self, trainer: Trainer) -> None:
        """Keep what a Trainer exports that has just resumed."""
        if self._loaded is None and self._saved is not None:
            with noted(f"raised with what was restored: have state() return it {PLAINLY}"):
                self._loaded = _states(trainer)

    def lost(self) -> dict[str, list[str]]:
        """Return, by callback, what is not as it was: the entries of its ``state()``, in words."""
        before, after = self._saved or {}, self._loaded
        if after is None:
            return {}
        found = {name: list(_differences(state, after.get(name))) for name, state in before.items()}
        return {name: lines for name, lines in found.items() if lines}


def with_exported(report: ResumeReport, exported: Exported, trainer: Trainer, allow: Iterable[str]) -> ResumeReport:
    """Add what callbacks export and does not come back: whoever wrote ``state()`` has said that it must.

    Args:
        report: the report of the check.
        exported: the states.
        trainer: a Trainer as they were trained.
        allow: ids of rules that may be broken.

    Returns:
        The report, in which the notes on such a callback have given way.
    """
    if not report.judged:
        return report
    told = {str(finding.evidence.get("piece")) for finding in report.findings}
    own = own_callbacks(trainer)
    lost = {name: lines for name, lines in exported.lost().items() if f"setup.{name}" not in told}
    findings = [_told("attribute-not-restored", trainer, *entry) for entry in lost.items() if entry[0] in own]
    notes = [_told("unsaved-attribute", trainer, *entry) for entry in lost.items() if entry[0] not in own]
    notes = [note for note in notes if note.rule not in allow]
    if "attribute-not-restored" in allow:
        findings = []
    places = frozenset(f"setup.{name}" for name in lost if findings and name in own)
    kept = tuple(note for note in report.notes if note.evidence.get("piece") not in places)
    return replace(report, findings=(*report.findings, *findings), notes=(*kept, *notes))


def _told(rule: str, trainer: Trainer, name: str, lines: list[str]) -> Finding:
    shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
    if trainer.args.restore_callback_states_from_checkpoint:
        cause = "its class does not restore from state() what it returns there"
        fix = 'have state() return it under "args" (what __init__ takes) or "attributes" (what is set afterwards)'
    else:
        cause = "the checkpoint holds what state() of the callback returns, and the resumed Trainer does not look at it"
        fix = "set restore_callback_states_from_checkpoint=True in TrainingArguments"
    return Finding(rule, f"callback {name}: {shown}", cause, fix, evidence={"exported": name})


def _states(trainer: Trainer) -> dict[str, Any]:
    callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
    return {name: _state(name, callback) for name, callback in named(callbacks).items()}


def _state(name: str, callback: ExportableState) -> Any:
    with noted(f"raised in state() of callback {name}"):
        return copy.deepcopy(callback.state())


def _differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield the entries of a state that are others than they were."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key, value in before.items():
            # what state() puts its entries under says nothing
            inner = place if not place and key in ("args", "attributes") else f"{place}.{key}" if place else str(key)
            yield from _differences(value, after.get(key), inner)
    elif not _same(before, after):
        plain = isinstance(before, _PLAIN) and isinstance(after, _PLAIN)
        values = f"{before!r} when saved, {after!r} after resuming" if plain else "another one after resuming"
        yield f"{place or 'state()'} {values}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):  # json makes lists of tuples
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (Tensor, numpy.ndarray)) or isinstance(b, (Tensor, numpy.ndarray)):
        return numpy.array_equal(_array(a), _array(b))
    return bool(a == b) or (a != a and b != b)


def _array(value: Any) -> Any:
    return value.detach().cpu().float().numpy() if isinstance(value, Tensor) else value
