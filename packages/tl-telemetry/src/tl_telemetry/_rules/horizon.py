"""The rule about schedules that are longer or shorter than the training that was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tl_core import Finding
from tl_telemetry._events import OptimizerStep, SchedulerStep
from tl_telemetry._evidence import Evidence, fresh_passes, several
from tl_telemetry._horizon import Horizon, horizons
from tl_telemetry._rules.schedule import optimizer_name, orphan


def schedule_horizon(run: Evidence) -> Iterator[Finding]:
    """Note schedules that are over before the planned updates are, or after them."""
    for name, scheduler in run.setup.schedulers.items():
        optimizer = optimizer_name(run, scheduler)
        found = horizons(scheduler)
        if not found or optimizer is None or optimizer not in run.options.num_updates or orphan(run, name):
            continue
        places = _places(run, name, optimizer)
        planned, updates = run.options.num_updates[optimizer], len(run.steps_by_optimizer.get(optimizer, []))
        rhythm = _rhythm(places, updates, len(run.overflows))
        if updates < planned and rhythm is None:
            yield _not_told(name, optimizer, planned, (len(places), updates))
            continue
        steps = len(places) if rhythm is None or updates == planned else rhythm[0] * planned // rhythm[1]
        if not steps:
            continue  # scheduler-never-stepped tells it
        for horizon in found:
            # T_max is one less where the last update takes the last rate; a skipped update may move a schedule or not
            if abs(horizon.steps - steps) > 1 + len(run.overflows) and (horizon.steps > steps or not horizon.is_warmup):
                yield _note(run, name, optimizer, horizon, steps, rhythm)


def _note(
    run: Evidence, name: str, optimizer: str, horizon: Horizon, steps: int, rhythm: tuple[int, int] | None
) -> Finding:
    planned = run.options.num_updates[optimizer]
    makes, then, part = "and makes", "", ""
    if horizon.steps > steps:
        makes, then = "but makes only", ", which end before that"
        part = ", or where these updates are a part of the training: then pass the number of all as num_updates="
    elif horizon.then:
        then = f": from its step {horizon.steps + 1} on {horizon.then}"
    return Finding(
        "schedule-horizon",
        f"{name!r} ({horizon.schedule}) {horizon.ends} after {several(horizon.steps, 'step')} of its own, {makes} "
        f"{steps} in the {several(planned, 'update')} of {optimizer!r}{_in_words(rhythm)}{then}",
        _cause(run, optimizer, horizon.steps, steps),
        f"give it the number of steps that it makes, {steps}, or step it as often as its length says; nothing, if it "
        f"is meant{part}",
        evidence={"horizon": horizon.steps, "scheduler_steps": steps, "updates": planned},
    )


def _not_told(name: str, optimizer: str, planned: int, seen: tuple[int, int]) -> Finding:
    calls, updates = seen
    return Finding(
        "not-judged",
        f"{name!r} stepped {several(calls, 'time')} in {several(updates, 'update')} of {optimizer!r}, which does not "
        f"tell how often it will in {planned}: whether its schedule is as long as the training could not be judged",
        "",
        "run until it has stepped at least twice, at equal distances",
    )


def stepped_before(run: Evidence) -> bool:
    """Tell whether a scheduler had stepped before the run began: an earlier run's updates count for its schedule."""
    for name, scheduler in run.setup.schedulers.items():
        calls = sum(event.count for _, event in run.scheduler_steps if event.scheduler == name)
        if getattr(scheduler, "last_epoch", calls) > calls:
            return True
    return False


def _places(run: Evidence, name: str, optimizer: str) -> list[int]:
    """Return how many updates came before each step of a scheduler."""
    updates, places = 0, []
    for _, event in run.events:
        if isinstance(event, OptimizerStep) and event.optimizer == optimizer and event.applied:
            updates += 1
        elif isinstance(event, SchedulerStep) and event.scheduler == name:
            places += [updates] * event.count
    return places


def _rhythm(places: list[int], updates: int, num_skipped: int) -> tuple[int, int] | None:
    """Return (steps of the scheduler, in how many updates) where it steps regularly; None where that does not show."""
    counts = Counter(places)
    between = [counts[place] for place in range(1, updates)]  # before the first and after the last it may be cut off
    if len(between) > 1:
        common, _ = Counter(between).most_common(1)[0]
        if common and sum(abs(count - common) for count in between) <= num_skipped:
            return common, 1
    distances = {after - before for before, after in pairwise([0, *places])}
    if len(places) > 1 and len(distances) == 1 and distances != {0}:
        return 1, distances.pop()
    return None


def _in_words(rhythm: tuple[int, int] | None) -> str:
    if rhythm is None:
        return ""
    steps, updates = rhythm
    if updates > 1:
        return f" (once in {updates} updates)"
    return "" if steps == 1 else f" ({steps} an update)"


def _cause(run: Evidence, optimizer: str, horizon: int, steps: int) -> str:
    planned, near = run.options.num_updates[optimizer], 1 + len(run.overflows)
    passes = {len(fresh_passes(event)) for _, event in run.steps_by_optimizer[optimizer]}
    if abs(steps - planned) > near and abs(horizon - planned) <= near:
        return "its length is the number of updates, which it does not step with"
    if len(passes) == 1 and (each := passes.pop()) > 1 and abs(horizon - planned * each) <= near:
        return f"its length is the number of backward passes ({each} an update), which it does not step with"
    return (
        "undecided: its length counts something else than its steps (epochs, micro-batches, updates), or is that of "
        "a longer or shorter training"
    )
