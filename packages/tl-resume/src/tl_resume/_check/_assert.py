"""The resume check's two faces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tl_core import Finding, Tolerances, TrainingSetup, standard_step
from tl_resume._check._ablate import Cause, establish
from tl_resume._check._evidence import Evidence
from tl_resume._check._loop import Loop, Run, Session, draw
from tl_resume._check._modules import first_different_module
from tl_resume._check._report import ResumeReport
from tl_resume._check._rule_ids import RESUME_FINDINGS, RESUME_NOTES, allowed
from tl_resume._check._rules import findings, notes
from tl_resume._check._runs import resumed, saving, uninterrupted
from tl_resume._check._store import Store
from tl_telemetry import Piece

CHECK = "Resume equivalence"


def check_resume_equivalent(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = 8,
    resume_at: int | None = None,
    save: Callable[[TrainingSetup, Path], Any] | None = None,
    load: Callable[[TrainingSetup, Path], Any] | None = None,
    restores_step: bool = False,
    make_step: Callable[[], Callable[[TrainingSetup, Any], Any]] | None = None,
    fresh_process: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Check that a run that is saved and resumed is the run that was never interrupted."""
    rules = allowed(allow, (*RESUME_FINDINGS, *RESUME_NOTES))
    tolerance = Tolerances().get("training_resume", device, rtol=rtol, atol=atol)
    chosen = _choose_step(step, loss_fn, make_step)
    loop = Loop(
        make_setup,
        chosen,
        make_step,
        save,
        load,
        draw(data, steps, seed),
        steps,
        device,
        seed,
        restores_step,
    )
    with tempfile.TemporaryDirectory(prefix="tl-resume-") as folder:
        (Path(folder) / "tensors").mkdir()
        session = Session(loop, Store(Path(folder) / "tensors"))
        (Path(folder) / "saved").mkdir()
        path = Path(folder) / "saved" / "checkpoint"
        full = uninterrupted(session)
        at, moved = _resume_at(resume_at, full, steps)
        saved = saving(session, at, path)
        back = resumed(session, at, path, saved=saved.saved)
        evidence = Evidence(loop, at, full, saved, back, tolerance)
        if evidence.diverged is not None and evidence.saving_parts is None:
            _ablate(session, evidence, path)
            if not findings(evidence) or evidence.cause is None or not evidence.cause.complete:
                evidence.first_module = first_different_module(session, at, path, evidence.diverged.step)
        return _report(evidence, rules, moved, session.cost)


def _ablate(session: Session, evidence: Evidence, path: Path) -> None:
    """Run the resumed half again, with pieces put back, to establish which of them makes the runs part."""

    def parts(put: frozenset[Piece]) -> bool:
        run = resumed(session, evidence.resume_at, path, saved=evidence.save.saved, put=put).run
        evidence.trials[put] = run
        return evidence.parted(run) is not None

    pieces = list(evidence.by_piece)
    if pieces:
        evidence.cause = establish(pieces, parts)
    evidence.__dict__.pop("still_different", None)


def _resume_at(given: int | None, full: Run, steps: int) -> tuple[int, bool]:
    """Choose the step to resume at: half of the steps, moved on to the first after a step that changed weights."""
    if given is not None:
        return given, False
    half = steps // 2
    for at in range(half, steps):
        before = full.trace.norms(at - 2) if at >= 2 else None
        if before is None or before != full.trace.norms(at - 1):
            return at, at != half
    return half, False


def _report(evidence: Evidence, rules: frozenset[str], moved: bool, cost: float) -> ResumeReport:
    found = [finding for finding in findings(evidence) if finding.rule not in rules]
    told = [note for note in notes(evidence) if note.rule not in rules]
    if moved:
        half = evidence.loop.steps // 2
        told.insert(
            0,
            Finding(
                "resume-moved",
                f"resumed at step {evidence.resume_at} instead of {half}: the steps before {half} had left the weights "
                "as they were, so gradients may have been pending (pass resume_at to save there all the same)",
                "",
                "",
            ),
        )
    trace, back = evidence.full.trace, evidence.resumed.run.trace
    return ResumeReport(
        CHECK,
        tuple(found),
        tuple(told),
        judged=bool(found) or evidence.repeatable,
        resume_at=evidence.resume_at,
        continuous=tuple(trace.losses(s)[trace.main_loss] for s in trace.steps),
        resumed=tuple(back.losses(s)[back.main_loss] for s in back.steps),
        state_differences=tuple(evidence.differences),
        diverged_at=None if evidence.diverged is None else evidence.diverged.step,
        cost=cost,
    )


def _choose_step(step: Any, loss_fn: Any, make_step: Any) -> Any:
    return step if step is not None or make_step is not None else standard_step(loss_fn)


def assert_resume_equivalent(*args: Any, **kwargs: Any) -> ResumeReport:
    """Assert it."""
    return check_resume_equivalent(*args, **kwargs).require()


__all__ = ["Cause", "assert_resume_equivalent", "check_resume_equivalent"]
