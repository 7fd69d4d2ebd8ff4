"""After how many of its steps a schedule is over, and what its rate does then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

from torch.optim import lr_scheduler


@dataclass(frozen=True)
class Horizon:
    """The length of a schedule, or of one part of it.

    Attributes:
        schedule: the class, and the argument that sets the length: ``CosineAnnealingLR, T_max=10``.
        steps: after how many steps of the scheduler it is over.
        then: what the rate does when the scheduler steps on; empty where nothing special happens.
        is_warmup: whether it leads up to the rate of the rest of the training, which may go on for any time.
        ends: what happens after so many steps, in words.
    """

    schedule: str
    steps: int
    then: str = ""
    is_warmup: bool = False
    ends: str = "is over"


def horizons(scheduler: Any) -> list[Horizon]:
    """Return the horizons of a scheduler of torch's, or of a ``LambdaLR`` as transformers builds them; perhaps none."""
    return list(dict.fromkeys(_horizons(scheduler)))


def _horizons(scheduler: Any) -> Iterator[Horizon]:
    kind = type(scheduler).__name__
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        for part in scheduler._schedulers:
            yield from _horizons(part)
    elif isinstance(scheduler, lr_scheduler.SequentialLR):
        yield from _last_of(scheduler)
    elif isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        yield Horizon(f"{kind}, T_max={scheduler.T_max}", scheduler.T_max, "the rate rises again")
    elif isinstance(scheduler, lr_scheduler.OneCycleLR):
        total = scheduler.total_steps
        yield Horizon(f"{kind}, total_steps={total}", total, "its step() raises a ValueError")
    elif isinstance(scheduler, lr_scheduler.LinearLR):
        rises = scheduler.start_factor <= scheduler.end_factor
        yield _iterations(kind, scheduler.total_iters, is_warmup=rises)
    elif isinstance(scheduler, lr_scheduler.ConstantLR):
        yield _iterations(kind, scheduler.total_iters, is_warmup=True)
    elif isinstance(scheduler, lr_scheduler.PolynomialLR):
        yield replace(_iterations(kind, scheduler.total_iters), then="the rate stays at 0")
    elif isinstance(scheduler, lr_scheduler.LambdaLR):
        for function in scheduler.lr_lambdas:
            steps = _bound(function).get("num_training_steps")
            if isinstance(steps, int) and not isinstance(steps, bool):
                yield Horizon(f"{kind}, num_training_steps={steps}", steps)


def _iterations(kind: str, steps: int, *, is_warmup: bool = False) -> Horizon:
    return Horizon(f"{kind}, total_iters={steps}", steps, "" if is_warmup else "the rate stays as it is", is_warmup)


def _last_of(scheduler: lr_scheduler.SequentialLR) -> Iterator[Horizon]:
    """Yield the horizons of the last of several schedules in a row, counted from the first one's beginning."""
    milestones, last = scheduler._milestones, scheduler._schedulers[-1]
    begin = milestones[-1] if milestones else 0
    found = list(_horizons(last))
    for one in found:
        shown = f"{type(scheduler).__name__}, {begin} steps and then {one.schedule}" if begin else one.schedule
        yield replace(one, schedule=shown, steps=begin + one.steps)
    if not found and begin:
        # where the last one has no end, it should at least begin
        shown = f"{type(scheduler).__name__}, milestones={list(milestones)}"
        yield Horizon(shown, begin, is_warmup=True, ends="begins its last schedule")


def _bound(function: Any) -> dict[str, Any]:
    """Return what a function has bound by name: the keywords of a partial, the variables of a closure."""
    if isinstance(function, partial):
        return {**_bound(function.func), **function.keywords}
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    bound = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            bound[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return bound
