"""Saving must change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._evidence import Evidence
from tl_resume._check._origin import LOW_PRECISION, is_rounded
from tl_resume._check._words import figures_part, module_names, tensor_names, title, values
from tl_telemetry import Piece, StateDifference

_HARMLESS = ("outside", "rng")  # a store of checkpoints; a draw that only matters where the loop draws too


def changes_training(evidence: Evidence) -> Iterator[Finding]:
    """``save`` changed what the loop trains with, and did not put it back."""
    changed: dict[Piece, list[StateDifference]] = {}
    for difference in evidence.save.changed:
        changed.setdefault(difference.piece, []).append(difference)
    parts = evidence.saving_parts if evidence.repeatable else None
    drawn = {piece for piece in changed if piece in evidence.drawn_from and parts is not None}
    mattering = {p: d for p, d in changed.items() if p.kind not in _HARMLESS or p in drawn}
    mattering = {p: [d for d in ds if _matters(evidence, d)] for p, ds in mattering.items()}
    mattering = {p: ds for p, ds in mattering.items() if ds}
    if Piece("weights") in mattering:  # a conversion takes the gradients along
        mattering.pop(Piece("gradients"), None)
    if not mattering:
        if parts is not None and not changed:
            yield Finding(
                "saving-changes-training",
                f"the run that saves before step {evidence.resume_at} is not the run that does not save: "
                f"{figures_part(parts, 'with the save')}; right after saving, nothing that was compared differs",
                "save() changed something that the setup does not show: a file that the loop reads, a library's state",
                "make save() read only, and put back what it has to change",
                steps=(parts.step,),
                evidence={"is_cause": True},
            )
        return
    seen = f"save() before step {evidence.resume_at} changed the training state: {_changes(evidence, mattering)}"
    if parts is not None:
        seen += f"; {figures_part(parts, 'in the run that saves')}"
    yield Finding(
        "saving-changes-training",
        seen,
        _cause(mattering),
        _fix(mattering),
        steps=(evidence.resume_at,),
        parameters=tuple(str(d.path[0]) for d in mattering.get(Piece("weights"), ())),
        evidence={"is_cause": True, "pieces": tuple(map(title, mattering))},
    )


def _matters(evidence: Evidence, difference: StateDifference) -> bool:
    """Tell whether a change is one of training state: not a counter, a score or a log that saving itself keeps."""
    if not _is_kept_by_save(difference):
        return True
    after = evidence.saving_parts
    return after is not None and all(map(_is_kept_by_save, evidence.save.changed))


def _is_kept_by_save(difference: StateDifference) -> bool:
    plain = difference.kind in ("number", "value")
    return difference.piece.kind == "attribute" or (difference.piece.kind == "state" and plain)


def _changes(evidence: Evidence, changed: dict[Piece, list[StateDifference]]) -> str:
    texts = []
    for piece, differences in changed.items():
        if piece.kind == "weights":
            names = evidence.weight_names
            shown = tensor_names(differences, names)
            first = values(differences[:1], then="before", now="after saving")
            texts.append(f"the values of {shown} ({first})")
        elif piece.kind == "modes":
            modes = {"eval" if d.plain_b is False else "training" for d in differences}
            texts.append(f"{' and '.join(sorted(modes))} mode was left on in {module_names(differences)}")
        elif piece.kind == "rng":
            texts.append(f"{title(piece)} was drawn from, which the loop draws from too")
        else:
            texts.append(values(differences, then="before", now="after saving"))
    return "; ".join(texts)


def _cause(changed: dict[Piece, list[StateDifference]]) -> str:
    if Piece("modes") in changed and len(changed) == 1:
        return "save() switches the mode and does not switch back: dropout and batch norm act otherwise from then on"
    differences = changed.get(Piece("weights"), [])
    if differences and all(_rounded(d) for d in differences):
        return "save() converts the live model to a lower precision: training goes on with the rounded weights"
    if differences:
        return "save() writes other values into the live model (an average, for export) and does not put them back"
    if all(piece.kind == "rng" for piece in changed):
        return "save() draws random numbers (an evaluation, a shuffled sample): the loop's next draws are other ones"
    return "save() works on the live objects instead of on copies"


def _fix(changed: dict[Piece, list[StateDifference]]) -> str:
    if Piece("modes") in changed and len(changed) == 1:
        return "put the modes back at the end of save(), or do not change them: state_dict() is the same in both modes"
    if Piece("weights") in changed:
        return "convert or average a copy: {name: tensor.to(...) for name, tensor in model.state_dict().items()}"
    if all(piece.kind == "rng" for piece in changed):
        return "put the generators back at the end of save() (tl_core.preserve_rng does), or do not draw in it"
    return "let save() read only, or put back what it changes"


def _rounded(difference: StateDifference) -> bool:
    a, b = difference.tensor_a(), difference.tensor_b()
    converted = a is not None and b is not None and a.dtype != b.dtype
    return converted or any(is_rounded(a, b, low) for low in LOW_PRECISION)
