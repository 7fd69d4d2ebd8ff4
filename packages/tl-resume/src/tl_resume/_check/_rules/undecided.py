"""What could not be decided, and what is said about the check itself."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._ablate import MAX_COST
from tl_resume._check._evidence import Evidence
from tl_resume._check._words import listed, listed_names, parting, title
from tl_telemetry import Piece


def diverges(evidence: Evidence) -> Iterator[Finding]:
    """The runs part, and nothing that was compared explains it."""
    found = evidence.diverged
    if found is None or evidence.saving_parts is not None:
        return
    if evidence.first_module.drawn_from:
        yield _drawn_between(evidence)
        return
    differing = [p for p in evidence.by_piece if p.kind != "gradients"]
    if differing:
        where = listed(differing)
        seen = f"after loading, there is a difference in {where}; putting that back does not give the uninterrupted run"
    else:
        seen = f"right after loading, everything that was compared is as saved: {_compared(evidence)}"
    if evidence.first_module.seen:
        seen += f"; {evidence.first_module.seen}"
    if evidence.warm_agrees:
        seen += (
            f"; loaded into a setup that was trained up to step {evidence.resume_at}, the checkpoint gives the "
            "uninterrupted run: what is lost is something that a fresh setup does not have"
        )
    open_ = ["state that could not be looked into"]
    if evidence.save.saved.uncopied:
        open_ = [f"{path} (a {kind})" for path, kind in evidence.save.saved.uncopied.items()]
    yield Finding(
        "resume-diverges",
        f"{parting(found)}; {seen}",
        f"not established; left open: {', '.join(open_)}, files that the loop reads, nondeterministic operations",
        f"see that load() puts {listed_names(evidence.save.saved.uncopied)} where it was when saved"
        if evidence.save.saved.uncopied
        else "look at what the step reads that neither the setup nor the step's own code shows",
        steps=(found.step,),
    )


def _drawn_between(evidence: Evidence) -> Finding:
    """Say that generators which were restored, or put back, stand otherwise when a module draws from them."""
    found, first = evidence.diverged, evidence.first_module
    assert found is not None
    pieces = [Piece("rng", name) for name in first.drawn_from]
    names = listed_names(map(title, pieces))
    restored = not any(piece in evidence.by_piece for piece in pieces)
    known = "that was as saved" if restored else "putting that back does not help"
    return Finding(
        "rng-not-restored",
        f"{parting(found)}; in step {found.step}, module {first.module} is the first that gives something else for the "
        f"same input: it draws from {names}, in another state than without interruption; right after loading, {known}",
        "something draws random numbers between load() and that module's call in one of the runs, and not in the "
        "other; the iterator of a DataLoader does so when it begins, one number for its workers",
        "give the loader a generator of its own, DataLoader(..., generator=torch.Generator()), or restore the random "
        "states when its iterator has begun",
        steps=(found.step,),
        evidence={"is_cause": True},
    )


def _compared(evidence: Evidence) -> str:
    names = [
        piece
        for piece in evidence.save.saved.pieces
        if piece.kind not in ("rng", "gradients", "outside", "modes", "module attributes")
        and title(piece) not in evidence.save.saved.uncopied
    ]
    return listed([*names, Piece("modes")]) + ", and the generators that the loop draws from"


def noise(evidence: Evidence) -> Iterator[Finding]:
    """The loop differs from itself when it is repeated."""
    if evidence.noise == 0:
        return
    unset = [path for path in evidence.save.saved.uncopied if not path.startswith(("setup", "model"))]
    if unset and not evidence.repeatable:
        names = ", ".join(unset)
        yield Finding(
            "not-judged",
            f"two runs from the same seed differ by {evidence.noise:.2g} (relative) without any resume, so the resumed "
            "run cannot be judged by comparing it; the state after loading was judged",
            f"{names} cannot be set back before each run, and goes on from where the run before had left it",
            f"build {names} in make_setup() or make_step()",
        )
        return
    tail = (
        f"differences count above {evidence.rtol:.2g} (relative) instead of {evidence.tolerance.rtol:.2g}"
        if evidence.repeatable
        else "so the resumed run cannot be judged by comparing it; the state after loading was judged"
    )
    yield Finding(
        "not-repeatable" if evidence.repeatable else "not-judged",
        f"two runs from the same seed differ by {evidence.noise:.2g} (relative) without any resume: {tail}",
        "something in the loop is not seeded (os.urandom, the time, an unseeded generator) or not deterministic",
        "seed it, or use torch.use_deterministic_algorithms(True) for the check",
    )


def untried(evidence: Evidence) -> Iterator[Finding]:
    """There were so many differences that not all of them were tried."""
    pieces = evidence.cause.untried if evidence.cause is not None else ()
    if pieces:
        yield Finding(
            "not-judged",
            f"{listed(pieces)} {'differs' if len(pieces) == 1 else 'differ'} after loading too; whether that makes the "
            f"runs part was not tried, since the check may cost {MAX_COST:.0f} runs of the loop",
            "",
            "mend what was found, and run the check again",
        )


def uncopied(evidence: Evidence) -> Iterator[Finding]:
    """Something could not be copied, so that its position could not be compared or put back."""
    found = evidence.save.saved.uncopied
    told = any(rule == "data-position-not-restored" for rule in evidence.told)
    if found and not told:
        shown = ", ".join(f"{path} (a {kind})" for path, kind in found.items())
        yield Finding(
            "not-copied",
            f"could not be compared or put back: {shown}; only the batches that it gave were compared",
            "a generator, or an iterator of a DataLoader, has no state that can be read or copied",
            "",
        )
