"""State that no state_dict() carries: plain attributes of the setup, and what lies outside of it."""

from __future__ import annotations

import numbers
from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._evidence import Evidence, is_at
from tl_resume._check._rules.data import is_loader, is_position
from tl_resume._check._words import established, place, title, values
from tl_resume._files import save_training_state
from tl_telemetry import Piece, StateDifference, own_object


def attributes(evidence: Evidence) -> Iterator[Finding]:
    """A plain attribute that training changes was not restored: it makes the runs part, or the loop decides by it."""
    for piece, differences in evidence.by_piece.items():
        if piece.kind not in ("attribute", "module attributes"):
            continue
        if evidence.is_cause(piece):
            if not all(map(_is_told_elsewhere, differences)) and not is_loader(evidence, piece):
                yield _finding(evidence, piece, "attribute-not-restored", differences)
        elif deciding := [d for d in _lost(evidence, differences) if _decides(evidence, d)]:
            yield _without_effect(evidence, piece, deciding)


def outside(evidence: Evidence) -> Iterator[Finding]:
    """Something outside of the setup (a global, a closure cell, the step's own object) makes the runs part."""
    for piece, differences in evidence.by_piece.items():
        own = not all(map(_is_told_elsewhere, differences))
        if piece.kind == "outside" and own and evidence.is_cause(piece):
            yield _finding(evidence, piece, "outside-state-not-restored", differences)


def unsaved(evidence: Evidence) -> Iterator[Finding]:
    """An attribute changed during training and is not restored, without effect on anything that was seen."""
    for piece, differences in evidence.by_piece.items():
        if piece.kind not in ("attribute", "module attributes", "outside") or evidence.is_cause(piece):
            continue
        if evidence.is_untried(piece):
            continue
        lost = _lost(evidence, differences)
        silent = [d for d in lost if piece.kind == "outside" or not _decides(evidence, d)]
        if silent:
            yield Finding(
                "unsaved-attribute",
                f"not restored, and no effect of it was seen in {evidence.loop.steps} steps: {values(silent)}",
                "left open; a history or a counter for output may start anew, what training comes to use may not",
                "save it if training uses it",
                evidence={"piece": title(piece)},
            )


def _lost(evidence: Evidence, differences: list[StateDifference]) -> list[StateDifference]:
    """Return what training had changed, and what is still different at the end.

    A counter or a best score by which the loop decides need not be: it may have been set again on the way, in this run.
    """
    return [
        d
        for d in differences
        if not _is_told_elsewhere(d)
        and any(is_at(moved, d) for moved in evidence.moved)
        and (evidence.remains(d) or (_is_number(d) and _decides(evidence, d)))
        and (d.piece, d.path) not in evidence.unsteady
    ]


def idle(evidence: Evidence) -> list[StateDifference]:
    """Return what was lost of attributes that training changes, and is no cause."""
    return [
        d
        for piece, differences in evidence.by_piece.items()
        if piece.kind in ("attribute", "module attributes") and not evidence.is_cause(piece)
        for d in differences
        if d.a is not None and any(is_at(moved, d) for moved in evidence.moved)
    ]


def may_decide(difference: StateDifference) -> bool:
    """Tell whether the loop may decide by a lost value: a number, a string, a tensor of one element."""
    return difference.kind in ("number", "value") or _is_scalar(difference)


def _is_scalar(difference: StateDifference) -> bool:
    return difference.tensor is not None and difference.tensor.num_elements == 1


def _is_number(difference: StateDifference) -> bool:
    if difference.kind == "tensor":
        return _is_scalar(difference)
    both = difference.plain_a, difference.plain_b
    return all(isinstance(value, numbers.Real) and not isinstance(value, bool) for value in both)


def _decides(evidence: Evidence, difference: StateDifference) -> bool:
    if evidence.holds_average(difference.piece) and _holds_tensors(evidence, difference):
        return True
    return (difference.piece, difference.path) in evidence.decisions


def _holds_tensors(evidence: Evidence, difference: StateDifference) -> bool:
    """Tell whether what differs is a tensor, or held some when saved."""
    below = len(difference.path)
    return any(path[:below] == difference.path for path, _, _ in evidence.save.saved.tensors(difference.piece))


def _finding(evidence: Evidence, piece: Piece, rule: str, differences: list[StateDifference]) -> Finding:
    found = evidence.diverged
    assert found is not None
    effect = established(evidence, piece)
    # what stands beside a counter in one object may be its history
    differences = [d for d in differences if not _is_history(d)] or differences
    where = "the setup" if rule == "attribute-not-restored" else "a place outside of the setup"
    return Finding(
        rule,
        values(differences) + effect,
        _cause(evidence, piece, where),
        _fix(evidence, piece, differences),
        steps=(found.step,),
        evidence={"is_cause": True, "piece": title(piece), "effect": effect},
    )


def _is_told_elsewhere(difference: StateDifference) -> bool:
    return difference.kind == "generator" or is_position(difference)


def _is_history(difference: StateDifference) -> bool:
    """Tell whether a sequence is longer on one side, and begins as the other one does."""
    return difference.kind == "other" and difference.type_name in ("list", "deque", "Values")


def _without_effect(evidence: Evidence, piece: Piece, differences: list[StateDifference]) -> Finding:
    sites = [site for d in differences if (site := evidence.decisions.get((d.piece, d.path)))]
    still = "; still different at the end of the run" if all(map(evidence.remains, differences)) else ""
    uses = f"; the loop decides by it ({', '.join(dict.fromkeys(sites))})" if sites else ""
    return Finding(
        "attribute-not-restored",
        f"{values(differences)}{still}{uses}",
        "training changes it, and the checkpoint does not carry it; "
        + ("its effect was not tried" if evidence.is_untried(piece) else "there was no effect on the losses yet"),
        _fix(evidence, piece, differences),
        steps=(evidence.resume_at,),
        evidence={"is_cause": False, "piece": title(piece)},
    )


def _cause(evidence: Evidence, piece: Piece, where: str) -> str:
    if evidence.as_built(piece):
        return (
            f"training changes it, load() leaves it as it was built: it lies in {where}, which no state_dict() covers"
        )
    come = evidence.origin(piece)
    if come is not None and come.kind == "rounded":
        return (
            f"the loaded values are the saved ones rounded to {come.dtype}: the checkpoint was written in {come.dtype}"
        )
    if come is not None and come.kind == "end":
        return "the loaded values are those of the end of the run that saved: the checkpoint refers to the live tensors"
    if come is not None and come.kind == "elsewhere" and come.source not in (None, piece):
        return f"the loaded values are the ones that {title(come.source)} held when saved"
    return "load() sets it to something else than what it was when saved"


def _fix(evidence: Evidence, piece: Piece, differences: list[StateDifference]) -> str:
    name = place(differences[0]).partition(" (")[0]
    if len(differences) > 1 or len(differences[0].path) > 1:  # the object, not its inside
        own = own_object(title(piece))
        name = title(piece) if own is None else own[1]
    if piece.kind == "outside":
        return f"save {name.partition(' (')[0]} in the checkpoint and set it in load(), or move it into the setup"
    if piece.kind == "module attributes":
        return f"save {place(differences[0])} in the checkpoint, or make a buffer of it, which state_dict() carries"
    if not evidence.as_built(piece):
        return f"restore {name} as it was saved"
    if evidence.loop.save is save_training_state:
        return (
            f"give {title(piece)} state_dict() and load_state_dict(), or keep plain data in the setup: "
            "save_training_state() carries both"
        )
    return f"save {name} in the checkpoint and set it again in load()"
