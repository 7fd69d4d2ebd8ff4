"""Random numbers and the position in the data."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._evidence import Evidence
from tl_resume._check._words import established, one, parting, place, title
from tl_telemetry import Piece, StateDifference

_GET_STATE = {
    "python": "random.getstate() and random.setstate()",
    "numpy": "numpy.random.get_state() and numpy.random.set_state()",
    "torch": "torch.get_rng_state() and torch.set_rng_state()",
}


def generators(evidence: Evidence) -> Iterator[Finding]:
    """A generator that the loop draws from was not restored, and the runs part because of it."""
    for piece, differences in evidence.by_piece.items():
        if not evidence.is_cause(piece):
            continue
        if piece.kind == "rng":
            how = _GET_STATE.get(piece.name, "torch.cuda.get_rng_state_all() and torch.cuda.set_rng_state_all()")
            yield _finding(
                evidence,
                "rng-not-restored",
                f"{title(piece)} is in another state after loading than when saved, and the loop draws from it",
                "its random numbers (dropout, augmentation, shuffling) are other ones after resuming",
                f"save and restore it with {how}, or use save_training_state()",
                piece,
            )
            continue
        own = piece.kind in ("attribute", "module attributes", "outside")
        if own and all(d.kind == "generator" for d in differences):
            names = ", ".join(place(d) for d in differences)
            yield _finding(
                evidence,
                "generator-not-restored",
                f"the random generator {names} is in another state after loading than when saved, "
                "and the loop draws from it",
                "a generator of the loop's own is in no state_dict(): its state must be saved by hand"
                if evidence.as_built(piece)
                else "load() sets it to another state than it had when saved, or draws from it after restoring it",
                f"save {place(differences[0])}.get_state() and restore it with set_state() in load()"
                if piece.kind == "attribute" and all("torch" in d.shown_a for d in differences)
                else "save the generator's state and set it again in load()",
                piece,
            )


def position(evidence: Evidence) -> Iterator[Finding]:
    """The resumed run trains on other batches than the uninterrupted one."""
    moved = [d for piece, ds in evidence.by_piece.items() for d in ds if is_position(d) or is_loader(evidence, piece)]
    caused = [d for d in moved if evidence.is_cause(d.piece)]
    where = evidence.position
    if caused:
        names = ", ".join(dict.fromkeys(place(d) if is_position(d) else title(d.piece) for d in caused))
        stands = f" ({one(caused[0], name=lambda _: '')})" if caused[0].kind == "iterator" else ""
        seen = f"the position of {names} was not restored{stands}"
        if where.kind not in ("same", "unseen"):
            seen += f": {where.seen}"
        yield _finding(evidence, "data-position-not-restored", seen, _CAUSE, _FIX, caused[0].piece)
    elif evidence.diverged is not None and _established(evidence):
        first, put_back = where.first_step, evidence.position_put_back
        still = put_back.kind
        told = still in ("restarted", "behind", "ahead") or (still not in ("same", "unseen") and evidence.warm_agrees)
        # a loader that shuffles anew gives samples in an order that the run never had
        told = told or (still == "other" and put_back.loader is not None)
        told = told and evidence.draws_by_itself
        if told and first is not None and first <= evidence.diverged.step:
            yield Finding(
                "data-position-not-restored",
                f"{_drawn_from(evidence)}{where.seen}; {parting(evidence.diverged)}",
                _CAUSE,
                _FIX,
                steps=(first,),
                evidence={"is_cause": True},
            )


def is_position(difference: StateDifference) -> bool:
    """Tell whether a difference is the place of an iterator over data; ``itertools.count`` is a counter."""
    return difference.kind == "iterator" and difference.type_name != "count"


def _drawn_from(evidence: Evidence) -> str:
    """Name the iterators whose position cannot be read, one of which the batches come from."""
    names = list(evidence.save.saved.uncopied)
    if not names:
        return ""
    if len(names) == 1:
        return f"the position of {names[0]} was not restored: "
    return f"the position of one of {', '.join(names)} was not restored: "


_CAUSE = "the data start at another place after resuming than where the run had stopped"
_FIX = (
    "save how many batches were drawn (or the sampler's or the loader's own state: torchdata's StatefulDataLoader has "
    "one) and go on from there in load()"
)


def _established(evidence: Evidence) -> bool:
    """Tell whether the contents of batches decide: nothing else differs, or putting it all back did not help."""
    return evidence.cause is None or not evidence.cause.complete


def is_loader(evidence: Evidence, piece: Piece) -> bool:
    """Tell whether a piece is a loader that says itself where it stands (torchdata's ``StatefulDataLoader``)."""
    cls = getattr(evidence.save.saved.pieces.get(piece), "type", object)
    return piece.kind in ("attribute", "outside", "state") and "DataLoader" in cls.__name__


def _finding(evidence: Evidence, rule: str, seen: str, cause: str, fix: str, piece: Piece) -> Finding:
    found = evidence.diverged
    assert found is not None
    effect = established(evidence, piece)
    told = {"is_cause": True, "piece": title(piece), "effect": effect}
    return Finding(rule, seen + effect, cause, fix, steps=(found.step,), evidence=told)
