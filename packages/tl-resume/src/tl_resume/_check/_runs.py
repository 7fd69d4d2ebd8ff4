"""The three runs: uninterrupted, uninterrupted with a save in the middle, and resumed from what was saved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_core import TrainingSetup, noted
from tl_resume._check._ledger import Ledger
from tl_resume._check._loop import Run, Session
from tl_resume._check._restores import Restored, watch_restores
from tl_telemetry import Piece, StateCapture, StateDifference, compare_captures, put_back

_MAX_FRESH = 4  # setups that are built in search of one whose parameters come in another order


@dataclass
class SavingRun:
    """The uninterrupted run that saves.

    Attributes:
        run: the run.
        saved: the state just before saving.
        changed: what saving changed: state just before against just after.
    """

    run: Run
    saved: StateCapture
    changed: list[StateDifference]


@dataclass
class ResumedRun:
    """The resumed half.

    Attributes:
        run: the run; its ``start`` is the fresh setup before loading.
        loaded: the state right after loading.
        restored: the calls of ``load_state_dict`` that ``load`` made.
        returned: what ``load`` returned.
        step_index: ``setup.step_index`` after loading.
        orders: the parameter order of every fresh setup that was built on the way.
    """

    run: Run
    loaded: StateCapture
    restored: list[Restored]
    returned: Any
    step_index: Any
    orders: list[dict[str, list[list[str]]]]


def whole_number(value: Any) -> int | None:
    """Return an int, a numpy integer or an integer tensor of one element as an int; None for anything else."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def uninterrupted(session: Session) -> Run:
    """Run the loop from start to end without saving."""
    loop = session.loop
    with session.fresh(loop.seed) as (setup, step, outside, run):
        with Ledger(setup) as run.ledger:
            session.train(setup, step, run, 0, loop.steps, what="uninterrupted run")
        run.end = session.capture(setup, outside)
    return run


def saving(session: Session, resume_at: int, path: Path) -> SavingRun:
    """Run the loop from start to end, and save before step ``resume_at``."""
    loop = session.loop
    with session.fresh(loop.seed) as (setup, step, outside, run):
        with Ledger(setup) as run.ledger:
            session.train(setup, step, run, 0, resume_at, what="run that saves")
            setup.step_index = resume_at
            saved = session.capture(setup, outside)
            with noted(f"raised in save() before step {resume_at}"):
                loop.save(setup, path)
            changed = compare_captures(saved, session.capture(setup, outside))
            session.outside.saved(changed)
            session.train(setup, step, run, resume_at, loop.steps, what="run that saves, after saving")
        run.end = session.capture(setup, outside)
    return SavingRun(run, saved, [difference for difference in changed if difference.piece.kind != "outside"])


def resumed(
    session: Session,
    resume_at: int,
    path: Path,
    *,
    saved: StateCapture,
    put: Iterable[Piece] = (),
    warm: bool = False,
    before_step: Callable[[TrainingSetup], None] | None = None,
    within: AbstractContextManager[Any] | None = None,
    other_order: dict[str, list[list[str]]] | None = None,
) -> ResumedRun:
    """Build a fresh setup, load the checkpoint, and run the rest.

    Args:
        session: what the runs share.
        resume_at: the step to go on from.
        path: the checkpoint.
        saved: the state when saved.
        put: pieces of it that are put back after loading.
        other_order: the order of parameters in another setup, which tells whether it varies from call to call.
        warm: load into a setup that was trained up to the checkpoint with the saved run's seed, instead of a fresh one:
            what lies in its hidden places (a generator, a worker) is then where it was when saved.
        before_step: called with the setup before each step.
        within: a context manager that the steps run in.
    """
    loop = session.loop
    orders: list[dict[str, list[list[str]]]] = []
    seed = loop.seed if warm else (loop.seed + 1) % 2**32
    for _ in range(_MAX_FRESH):
        with session.fresh(seed) as (setup, step, outside, run):
            orders.append(run.order)
            # state that is restored by position is at the right parameters by luck, where the orders agree by luck
            varied = any(order not in (None, saved.order) for order in (other_order, *orders))
            if varied and run.order == saved.order and len(orders) < _MAX_FRESH:
                continue
            setup.step_index = 0 if loop.restores_step else resume_at
            with Ledger(setup) as run.ledger:
                if warm:
                    session.train(setup, step, run, 0, resume_at, what="repeated run")
                with noted("raised in load(), with a fresh setup"), watch_restores(setup, session, saved) as restored:
                    returned = loop.load(setup, path)
                step_index = setup.step_index
                loaded = session.capture(setup, outside)
                put_back(saved, setup, put, outside=outside.access())
                try:
                    with within or nullcontext():
                        session.train(
                            setup, step, run, resume_at, loop.steps, what="resumed run", before_step=before_step
                        )
                except Exception as error:  # noqa: BLE001  the uninterrupted run did not raise: this is a symptom
                    run.error = f"{type(error).__name__} ({str(error).splitlines()[0] if str(error) else 'no message'})"
            run.end = session.capture(setup, outside)
            break
    return ResumedRun(run, loaded, restored, returned, step_index, orders)
