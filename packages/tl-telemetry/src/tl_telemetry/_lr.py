"""Compares learning rates with an expected schedule, and looks for what would explain a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tl_core import Finding

from ._evidence import Evidence, at, several, telling

# How many steps a schedule may be shifted by to be recognised.
MAX_SHIFT = 3

Expected = Callable[[int], float] | Sequence[float]


def compare(run: Evidence, expected: Expected, optimizer: str | None, group: int, rtol: float) -> Finding | None:
    """Return a finding where the used rates differ from the expected ones."""
    name = _optimizer(run, optimizer)
    rates = {record.step: record.lrs[name] for record in run.records if name in record.lrs}
    groups = len(next(iter(rates.values()), ()))
    if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < max(groups, 1):
        raise ValueError(f"group must be an index of the {groups} parameter groups of {name!r}, got {group!r}")
    used = {step: of_step[group] for step, of_step in rates.items()}
    wanted = _schedule(expected, len(run.records))
    differing = [step for step, lr in used.items() if not _close(lr, wanted(step), rtol)]
    if not differing:
        return None
    first = differing[0]
    cause, fix = _explain(run, name, used, wanted, expected, rtol)
    return Finding(
        rule="lr-unexpected",
        seen=f"the learning rate of {name!r} (group {group}) differs from the expected one in {len(differing)} of "
        f"{several(len(used), 'step')} ({at(differing)}): in step {first} it was {used[first]:g}, {wanted(first):g} expected",
        cause=cause,
        fix=fix,
        steps=telling(differing),
        evidence={
            "steps": len(used),
            "differing": len(differing),
            "first": first,
            "lr": used[first],
            "expected": wanted(first),
        },
    )


def _optimizer(run: Evidence, optimizer: str | None) -> str:
    names = list(run.setup.optimizers)
    if optimizer is None:
        if len(names) != 1:
            raise ValueError(
                f"optimizer must be given: the setup has {len(names)} of them, {', '.join(map(repr, names))}"
            )
        return names[0]
    if optimizer not in names:
        raise ValueError(f"optimizer must be one of {', '.join(map(repr, names))}, got {optimizer!r}")
    return optimizer


def _schedule(expected: Expected, count: int) -> Callable[[int], float]:
    if callable(expected):
        function = expected
        return lambda step: float(function(step))
    if isinstance(expected, (str, bytes)) or not isinstance(expected, Sequence):
        raise TypeError(
            f"expected must be a function of the step index or a list of rates, got {type(expected).__name__}"
        )
    if len(expected) != count:
        raise ValueError(f"expected must be as long as the run ({count} steps), got {len(expected)} values")
    values = [float(value) for value in expected]
    return lambda step: values[step]


def _close(a: float, b: float, rtol: float) -> bool:
    return math.isclose(a, b, rel_tol=rtol, abs_tol=1e-12)


def _explain(
    run: Evidence, name: str, used: dict[int, float], wanted: Callable[[int], float], expected: Expected, rtol: float
) -> tuple[str, str]:
    """Return (cause, fix): the first explanation under which every used rate is as expected."""
    steps = sorted(used)
    stepped = {event.scheduler for _, event in run.scheduler_steps}
    own = [n for n, s in run.setup.schedulers.items() if getattr(s, "optimizer", None) is run.setup.optimizers[name]]

    def fits(at_step: Callable[[int], float | None]) -> bool:
        pairs = [(used[step], at_step(step)) for step in steps]
        known = [(lr, value) for lr, value in pairs if value is not None]
        return len(known) * 2 >= len(pairs) and all(_close(lr, value, rtol) for lr, value in known)

    def at_index(index: int) -> float | None:
        if index < 0:
            return None
        if not callable(expected) and index >= len(expected):
            return None
        return wanted(index)

    if len(set(used.values())) == 1:
        idle = [n for n in own if n not in stepped]
        if idle:
            return (
                f"{' and '.join(map(repr, idle))} is never stepped: the rate stays at its first value",
                "call its step() after optimizer.step()",
            )
        return "the rate never changes: no scheduler drives it, or its step() is never reached", "step the scheduler"
    for shift in [s for n in range(1, MAX_SHIFT + 1) for s in (n, -n)]:
        if fits(lambda step, s=shift: at_index(step + s)):  # type: ignore[misc]
            if shift > 0:
                return (
                    f"the schedule runs {several(shift, 'step')} ahead: scheduler.step() comes before optimizer.step(), or "
                    "is called once more before the loop",
                    "call scheduler.step() after optimizer.step()",
                )
            return (
                f"the schedule lags {several(-shift, 'step')} behind",
                "check where the schedule's first step is called",
            )
    factors = {round(used[step] / wanted(step), 6) for step in steps if wanted(step)}
    if len(factors) == 1:
        factor = factors.pop()
        return (
            f"every rate is {factor:g} times the expected one: another base rate, or a factor (accumulation, world size, "
            "batch size) applied once too often or too rarely",
            "compare the optimizer's lr with the one the expectation starts from",
        )
    for unit in range(2, len(steps)):
        if fits(lambda step, u=unit: at_index(step * u)):  # type: ignore[misc]
            return (
                f"the schedule runs {unit} times too fast: scheduler.step() is called {unit} times a step (for each "
                "micro-batch, or in two places)",
                "call scheduler.step() once an update",
            )
        if fits(lambda step, u=unit: at_index(step // u)):  # type: ignore[misc]
            return (
                f"the schedule moves once in {unit} steps: scheduler.step() is called once an accumulation cycle or epoch, "
                "the expectation counts steps",
                f"expect the rate of step // {unit}, or step the scheduler in every step",
            )
    return (
        "undecided: no shift, factor or unit explains the difference",
        "print the schedule's values beside the expected ones",
    )
