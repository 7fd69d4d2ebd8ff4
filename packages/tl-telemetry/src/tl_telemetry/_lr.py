"""Compares learning rates with an expected schedule, and looks for what would explain a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tl_core import Finding
from tl_telemetry._evidence import Evidence, at, several, telling
from tl_telemetry._rules.schedule import ORPHANED, orphan
from tl_telemetry._schedulers import drives

# How many steps a schedule may be shifted by to be recognised.
MAX_SHIFT = 3

Expected = Callable[[int], float] | Sequence[float]


def compare(run: Evidence, expected: Expected, optimizer: str | None, group: int, rtol: float) -> Iterator[Finding]:
    """See used rates that differ from the expected ones."""
    name = _optimizer(run, optimizer)
    rates = {record.step: record.lrs[name] for record in run.records if name in record.lrs}
    groups = len(next(iter(rates.values()), ()))
    if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < max(groups, 1):
        raise ValueError(f"group must be an index of the {groups} parameter groups of {name!r}, got {group!r}")
    used = {step: of_step[group] for step, of_step in rates.items()}
    wanted = _schedule(expected, len(run.records))
    differing = [step for step, lr in used.items() if not _close(lr, wanted(step), rtol)]
    if not differing:
        return
    first = differing[0]
    cause, fix = _explain(run, name, used, wanted, expected, rtol)
    yield Finding(
        rule="lr-unexpected",
        seen=f"the learning rate of {name!r} (group {group}) differs from the expected one in {len(differing)} of "
        f"{several(len(used), 'step')} ({at(differing)}): in step {first} it was {used[first]:g}, {wanted(first):g} "
        "expected",
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
    own = [n for n, s in run.setup.schedulers.items() if drives(s, run.setup.optimizers[name])]

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

    if not own and (found := next(((n, o) for n in run.setup.schedulers if (o := orphan(run, n))), None)):
        scheduler, (_, _, kind) = found
        return (
            f"{scheduler!r} steps, but the {kind} that it drives is not in the setup: {ORPHANED}",
            "build the scheduler for the optimizer that steps, or change that one in place (add_param_group)",
        )
    constant = len(set(used.values())) == 1
    if constant and len({wanted(step) for step in steps}) > 1:
        return _never_moves(run, name, own, stepped)
    reasons: list[tuple[str, str]] = []
    shifts = [shift for n in range(1, MAX_SHIFT + 1) for shift in (n, -n)]
    shift = next((s for s in shifts if fits(lambda step, s=s: at_index(step + s))), None)  # type: ignore[misc]
    if shift is not None and not constant:
        reasons.append(_shifted(run, own, shift))
    factors = [used[step] / wanted(step) for step in steps if wanted(step)]
    if factors and all(_close(factor, factors[0], rtol) for factor in factors):
        reasons.append(
            (
                f"every rate is {factors[0]:g} times the expected one: another base rate, or a factor (accumulation, "
                "world size, batch size) that is applied once too often or too rarely",
                "compare the optimizer's lr with the one that the expectation starts from",
            )
        )
    for unit in range(2, len(steps)):
        if reasons or constant:
            break
        if fits(lambda step, u=unit: at_index(step * u)):  # type: ignore[misc]
            reasons.append(_too_fast(run, own, unit, len(steps)))
        elif fits(lambda step, u=unit: at_index(step // u)):  # type: ignore[misc]
            reasons.append(
                (
                    f"the schedule moves once in {unit} steps, the expectation in each: scheduler.step() "
                    "is called once an update of several micro-batches, or once an epoch",
                    f"expect the rate of step // {unit}, or {_step_it(run)} in every step",
                )
            )
    if len(reasons) == 1:
        return reasons[0]
    if reasons:  # an exponential schedule that is shifted is also one with another base rate
        causes, fixes = zip(*reasons, strict=True)
        return "undecided, both explain every rate: " + "; or ".join(causes), "; or ".join(fixes)
    return (
        "undecided: no shift, factor or unit explains the difference",
        "print the schedule's values beside the expected ones",
    )


def _step_it(run: Evidence) -> str:
    """Say how a scheduler comes to be stepped."""
    if run.setup.driver == "Lightning":
        return "let Lightning step it ('interval': 'step' in what configure_optimizers() returns for it)"
    return f"let {run.setup.driver} step it" if run.setup.driver else "call scheduler.step()"


def _never_moves(run: Evidence, name: str, own: list[str], stepped: set[str]) -> tuple[str, str]:
    idle = [name for name in own if name not in stepped]
    if idle:
        return (
            f"{' and '.join(map(repr, idle))} never stepped in the run, so that the rate stays at its first value",
            "call its step() after optimizer.step() (or expect the rate of epochs, if it steps once an epoch)",
        )
    if own:
        return (
            f"{' and '.join(map(repr, own))} steps, but the rate never moves: the schedule is flat here, "
            "or something sets the rate back",
            "print the schedule's values beside the expected ones",
        )
    optimizer = run.setup.optimizers[name]
    if "lr" in getattr(optimizer, "__dict__", {}) and type(optimizer).__module__.startswith("torch."):
        return (
            f"the rate never moves: something writes optimizer.lr, which {type(optimizer).__name__} does not read",
            "write to each of optimizer.param_groups: group['lr'] = rate",
        )
    others = [
        f"{scheduler!r} drives {other!r}"
        for scheduler in sorted(stepped)
        for other, optimizer in run.setup.optimizers.items()
        if drives(run.setup.schedulers[scheduler], optimizer)
    ]
    shown = f" ({', '.join(others)})" if others else ""
    return (
        f"the rate never moves, and no scheduler of the setup drives it{shown}",
        "give the optimizer its scheduler, and call its step() after optimizer.step(); a loop that sets rates by hand "
        "must write to optimizer.param_groups[...]['lr']",
    )


def _shifted(run: Evidence, own: list[str], shift: int) -> tuple[str, str]:
    if shift < 0:
        return (
            f"the schedule lags {several(-shift, 'step')} behind the expectation",
            "call scheduler.step() after every update from the first one on, or count the expectation from there",
        )
    # whether it was ahead from the start, or moved before the first update, is seen from the order of acts
    first = next((event for record in run.records for event in record.optimizer_step_events), None)
    order = {id(event): n for n, event in enumerate(e for record in run.records for e in record.events)}
    early = first is not None and any(
        event.scheduler in own and order[id(event)] < order[id(first)] for _, event in run.scheduler_steps
    )
    ahead = f"the schedule runs {several(shift, 'step')} ahead of the expectation: "
    if early:
        return (
            ahead + "scheduler.step() is called before optimizer.step()",
            "call scheduler.step() after optimizer.step()",
        )
    return (
        ahead
        + "it was ahead before the first step of the run (stepped before the loop, or resumed), or the expectation "
        "counts from another step",
        "step the scheduler only after updates, or count the expectation from where the schedule begins",
    )


def _too_fast(run: Evidence, own: list[str], unit: int, steps: int) -> tuple[str, str]:
    calls = sum(event.count for _, event in run.scheduler_steps if event.scheduler in own)
    faster = f"the schedule runs {unit} times too fast"
    counted = f"{several(calls, 'call')} in {several(steps, 'step')}"
    length = "its length (T_max, total_steps, a warmup) counts another unit, such as epochs or accumulated updates"
    if calls > 0.75 * unit * steps:
        return (
            f"{faster}: scheduler.step() is called {unit} times a step ({counted}), in every micro-batch or in two "
            "places, or the expectation counts a larger unit",
            "call scheduler.step() once for each step that the expectation counts",
        )
    if 0 < calls <= steps:
        return (
            f"{faster}, although scheduler.step() is called no more than once a step ({counted}): {length}",
            f"build the schedule {unit} times as long: in the unit in which its step() is called",
        )
    return (
        f"undecided: {faster}; scheduler.step() is called too often ({counted}), or {length}",
        "print the schedule's values beside the expected ones",
    )
