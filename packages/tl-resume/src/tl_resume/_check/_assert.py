"""The resume check's two faces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from math import nan
from pathlib import Path
from typing import Any

import torch

from tl_core import Finding, Tolerances, TrainingSetup, check_rule_ids, standard_step
from tl_resume._check._ablate import MAX_COST, establish
from tl_resume._check._decides import deciding_lines
from tl_resume._check._evidence import Evidence
from tl_resume._check._loop import Loop, Run, Session, draw
from tl_resume._check._modules import first_different_module
from tl_resume._check._process import check_importable, resumed_elsewhere
from tl_resume._check._report import ResumeReport, losses_table
from tl_resume._check._rule_ids import RESUME_FINDINGS, RESUME_NOTES
from tl_resume._check._rules import findings, notes
from tl_resume._check._rules.hidden import idle, may_decide
from tl_resume._check._runs import resumed, saving, uninterrupted
from tl_resume._check._store import Store
from tl_resume._files import load_training_state, save_training_state
from tl_telemetry import Piece, StateDifference

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
    """Check that a run that is saved, killed and resumed is the run that was never interrupted.

    The loop is run three times: without interruption; without interruption, but with ``save`` in the middle, which
    must change nothing; and resumed, from a fresh setup with another seed that ``load`` restores. Losses and weights
    are compared step by step, and the whole state right after loading and at the end. Where the runs part, the resumed
    half is run again with what differed put back, until it is established which piece it was.

    What the step uses outside of the setup (globals, closure cells, defaults, the object that it is bound to) is set
    back before each run, as a new process would find it. All random number generators are put back at the end.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``; returns a fresh ``TrainingSetup`` or a
            ``(model, optimizer[, scheduler[, scaler[, state]]])`` tuple.
        data: one batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from the step
            index to a batch. Drawn once: every run gets copies of the same batches at the same steps.
        step: ``step(setup, batch)``, the training step; returns a scalar loss or a dict of named ones.
        loss_fn: ``loss_fn(model, batch)`` instead of ``step``; ``standard_step`` does the rest.
        steps: how many steps the uninterrupted run has; at least 2.
        resume_at: the step before which is saved, from 1 to ``steps - 1``. None: half of the steps, moved on to the
            first after a step that changed the weights, so that no gradients are pending.
        save: ``save(setup, path)``, the person's own; makes a file or a folder at ``path`` (a ``pathlib.Path``), which
            does not exist yet. None, with ``load``: ``save_training_state``.
        load: ``load(setup, path)``; restores what ``save`` wrote into a fresh setup. None: ``load_training_state``.
        restores_step: demand that ``load`` returns the step to go on from, or sets ``setup.step_index`` to it. Without
            it, ``setup.step_index`` is set for the step anyway.
        make_step: ``make_step()`` builds the step anew for each run, instead of ``step``.
        fresh_process: run the resumed half in a spawned process. The functions must be at the top of a module.
        device: where the model and the batches are put.
        seed: seeds python, numpy and torch before ``make_setup`` is called; the resumed setup gets the next one.
        rtol: relative tolerance of losses and weights; None is that of ``training_resume`` in ``tl_core.Tolerances``
            (1e-5).
        atol: absolute tolerance; None is that of ``training_resume`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: an argument is not what is allowed. Exceptions from the given code pass through, with a
            note of the step and phase they came from.
    """
    rules = check_rule_ids(allow, "allow", (*RESUME_FINDINGS, *RESUME_NOTES))
    _check_arguments(step, loss_fn, make_step, steps, resume_at, save, load)
    tolerance = Tolerances().get("training_resume", device, rtol=rtol, atol=atol)
    save = save_training_state if save is None else save
    load = load_training_state if load is None else load
    functions = {}
    if fresh_process:
        functions = check_importable(
            make_setup=make_setup, step=step, loss_fn=loss_fn, make_step=make_step, save=save, load=load
        )
    if loss_fn is not None:
        step = standard_step(loss_fn)
    batches = draw(data, steps, seed)
    loop = Loop(make_setup, step, make_step, save, load, batches, steps, device, seed, restores_step)
    with tempfile.TemporaryDirectory(prefix="tl-resume-") as name:
        folder = Path(name)
        for part in ("saved", "tensors", "elsewhere"):
            (folder / part).mkdir()
        path = folder / "saved" / "checkpoint"
        session = Session(loop, Store(folder / "tensors"))
        try:
            full = uninterrupted(session)
            at, moved = _resume_at(resume_at, full, steps)
            saved = saving(session, at, path)
            if fresh_process:
                back = resumed_elsewhere(session, functions, at, path, folder / "elsewhere", saved.saved)
            else:
                back = resumed(session, at, path, saved=saved.saved, other_order=full.order)
            evidence = Evidence(loop, at, full, saved, back, tolerance)
            if evidence.diverged is not None and evidence.saving_parts is None:
                _explain(session, evidence, path, fresh_process)
            _look_for_decisions(session, evidence, path)
            return _report(evidence, rules, moved, session.cost)
        finally:
            session.outside.reset()


def assert_resume_equivalent(
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
    """Assert that a run that is saved, killed and resumed is the run that was never interrupted.

    The arguments are those of ``check_resume_equivalent``.

    Example:
        >>> import torch
        >>> def make_setup():
        ...     model = torch.nn.Linear(4, 1)
        ...     return model, torch.optim.Adam(model.parameters())
        >>> report = assert_resume_equivalent(
        ...     make_setup, torch.randn(8, 4), loss_fn=lambda model, batch: model(batch).pow(2).mean()
        ... )
        >>> print(report)
        Resume equivalence: passed

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: the resumed run is another one, or something was not restored.
        NotJudged: the loop differs so much from itself that nothing can be told.
        TypeError, ValueError: an argument is not what is allowed.
    """
    return check_resume_equivalent(
        make_setup,
        data,
        step,
        loss_fn=loss_fn,
        steps=steps,
        resume_at=resume_at,
        save=save,
        load=load,
        restores_step=restores_step,
        make_step=make_step,
        fresh_process=fresh_process,
        device=device,
        seed=seed,
        rtol=rtol,
        atol=atol,
        allow=allow,
    ).require()


def _check_arguments(step: Any, loss_fn: Any, make_step: Any, steps: Any, resume_at: Any, save: Any, load: Any) -> None:
    given = {"step": step, "loss_fn": loss_fn, "make_step": make_step}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise TypeError(
            f"pass one of step, loss_fn and make_step, got {' and '.join(names) or 'none'}: step(setup, batch) trains, "
            "loss_fn(model, batch) only computes the loss, make_step() builds a step for each run"
        )
    for name, value in (*given.items(), ("save", save), ("load", load)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a function, got {type(value).__name__}")
    if (save is None) != (load is None):
        missing = "save" if save is None else "load"
        raise TypeError(f"pass both save and load, or neither (the training state is saved then); {missing} is missing")
    for name, value in (("steps", steps), ("resume_at", resume_at)):
        if isinstance(value, bool) or not isinstance(value, (int, type(None))):
            raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if steps is None or steps < 2:
        raise ValueError(f"steps must be at least 2, one before and one after the resume; got {steps}")
    if resume_at is not None and not 1 <= resume_at < steps:
        raise ValueError(f"resume_at must be from 1 to steps - 1 = {steps - 1}, got {resume_at}")


def _resume_at(given: int | None, full: Run, steps: int) -> tuple[int, bool]:
    """Choose the step to resume at: half of the steps, moved on to the first after a step that changed weights."""
    if given is not None:
        return given, False
    half = steps // 2
    for at in range(half, steps):
        if at < 2 or full.trace.norms(at - 2) != full.trace.norms(at - 1):
            return at, at != half
    return half, False


def _explain(session: Session, evidence: Evidence, path: Path, fresh_process: bool) -> None:
    """Run the resumed half again, with pieces put back, to establish which of them makes the runs part."""
    saved, at = evidence.save.saved, evidence.resume_at

    def parts(put: frozenset[Piece]) -> bool:
        run = resumed(session, at, path, saved=saved, put=put).run
        evidence.trials[put] = run
        return evidence.parted(run) is not None

    if fresh_process and not parts(frozenset()):
        evidence.only_elsewhere = True
        return
    pieces = list(evidence.by_piece)
    if pieces:
        part = 1 - at / session.loop.steps  # of a run
        spare = 1 if _undecided(evidence) else 0  # the run that looks for decisions
        evidence.cause = establish(pieces, parts, max(1, int((MAX_COST - session.cost) / part) - spare))
    if evidence.cause is not None and evidence.cause.complete:
        return
    warm = resumed(session, at, path, saved=saved, put=pieces, warm=True).run
    evidence.warm_agrees = evidence.parted(warm) is None
    assert evidence.diverged is not None
    if all(finding.rule == "resume-diverges" for finding in findings(evidence)):
        evidence.first_module = first_different_module(session, at, path, evidence.diverged.step)


def _look_for_decisions(session: Session, evidence: Evidence, path: Path) -> None:
    """Find out by which of the lost values that made no difference yet the loop decides."""
    if values := _undecided(evidence):
        evidence.decisions = deciding_lines(session, evidence, path, values, idle(evidence))


def _undecided(evidence: Evidence) -> list[StateDifference]:
    """Return the lost values of which a further run can tell whether the loop decides by them."""
    return list(filter(may_decide, idle(evidence))) if evidence.repeatable else []


def _report(evidence: Evidence, allow: frozenset[str], moved: bool, cost: float) -> ResumeReport:
    found = tuple(finding for finding in findings(evidence) if finding.rule not in allow)
    evidence.told = tuple(finding.rule for finding in found)
    told = [note for note in notes(evidence) if note.rule not in allow]
    if moved and "resume-moved" not in allow:
        told.insert(0, _moved(evidence))
    trace, back = evidence.full.trace, evidence.resumed.run.trace
    return ResumeReport(
        CHECK,
        found,
        tuple(told),
        detail=losses_table(evidence) if found and evidence.diverged is not None else "",
        judged=evidence.repeatable,
        resume_at=evidence.resume_at,
        continuous=tuple(trace.losses(step).get(trace.main_loss, nan) for step in trace.steps),
        resumed=tuple(back.losses(step).get(back.main_loss, nan) for step in back.steps),
        state_differences=tuple(evidence.differences),
        diverged_at=None if evidence.diverged is None else evidence.diverged.step,
        cost=cost,
    )


def _moved(evidence: Evidence) -> Finding:
    half = evidence.loop.steps // 2
    return Finding(
        "resume-moved",
        f"resumed at step {evidence.resume_at} instead of {half}: step {half - 1} left the weights as they were, "
        "so that gradients may have been pending",
        "",
        f"pass resume_at={half} to save there all the same",
    )
