"""Rules about updates that a scaler skips, and about what moves on meanwhile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tl_amp._acts import Attempt, attempts
from tl_amp._rules.finite import made_in, overflow
from tl_amp._words import at, history, scale_of, several, telling
from tl_core import Finding
from tl_telemetry import Evidence, ScalerUpdate, StateMoved, Unscaling, explain_nonfinite

# A scale below this makes nothing larger any more.
LEAST_SCALE = 1.0
# From so many updates on, all of them skipped, a scale is not only on its way down.
FEW = 3
# How many micro-batches of an update are repeated to find an overflow.
MAX_MICRO_BATCHES = 8
# From this share of a run's updates on, what is ahead of them is a finding.
FAR_AHEAD = 0.1


def skipped_updates(run: Evidence, every: int, allowed: float) -> Iterator[Finding]:
    """See scalers that skip a large share of an optimizer's updates, or whose scale vanishes."""
    by_optimizer: dict[str, list[Attempt]] = {}
    for attempt in attempts(run):
        by_optimizer.setdefault(attempt.optimizer, []).append(attempt)
    if not by_optimizer:
        yield from _unseen(run, every, allowed)
    told: set[str] = set()
    for name, tried in by_optimizer.items():
        skipped = [attempt for attempt in tried if not attempt.applied]
        first = next((index for index, attempt in enumerate(tried) if attempt.applied), len(tried))
        judged = tried[first:] if first < len(tried) else tried
        late = [attempt for attempt in judged if not attempt.applied]
        if first == len(tried) and len(tried) < FEW:
            if skipped:
                yield _too_few(name, skipped)
            continue
        way = _way(run, tried[0].scaler)
        too_many = len(late) > 1 and len(late) > allowed * len(judged)
        vanished = bool(way) and way[-1] < LEAST_SCALE and len(skipped) >= FEW
        if tried[0].scaler in told or not (too_many or vanished):
            continue
        if not vanished and len(late) < len(judged) and _comes_down(run, late[-1], way):
            continue
        told.add(tried[0].scaler)
        if too_many:
            yield _finding(run, name, len(tried), late, len(judged), way, allowed)
        else:
            yield _vanished(run, name, len(tried), skipped, way)


def _comes_down(run: Evidence, last: Attempt, way: list[float]) -> bool:
    """Tell whether a scale that started too high still comes down: it never rose, and scaled gradients overflow."""
    if any(after > before for before, after in itertools.pairwise(way)):
        return False
    first = next(iter(_made(run, last)), None)
    return first is not None and first.backward and first.dtype is torch.float16 and not first.nan


def _made(run: Evidence, attempt: Attempt) -> tuple[Any, ...]:
    """Return what first made non-finite values in the micro-batches of an update."""
    before = [a.step for a in attempts(run) if a.optimizer == attempt.optimizer and a.place < attempt.place]
    steps = range(before[-1] + 1 if before else 0, attempt.step + 1)
    return next(filter(None, (made_in(run, step) for step in steps[-MAX_MICRO_BATCHES:])), ())


def _too_few(name: str, skipped: list[Attempt]) -> Finding:
    return Finding(
        "not-judged",
        f"all {several(len(skipped), 'update')} of {name!r} in this run {'was' if len(skipped) == 1 else 'were'} "
        "skipped by the GradScaler: whether its scale is only on its way down could not be judged",
        "",
        "run more steps",
    )


def _way(run: Evidence, scaler: str) -> list[float]:
    """Return the values of a scaler's scale, in order."""
    found: list[float] = []
    for _, event in run.events:
        if isinstance(event, ScalerUpdate) and event.scaler == scaler:
            before = None if event.before is None else event.before.value()
            if before is not None and (not found or found[-1] != before):  # it may be set between updates
                found.append(before)
            if event.after is not None:
                found.append(event.after.value())
    return found


def _finding(
    run: Evidence, name: str, tried: int, late: list[Attempt], judged: int, way: list[float], allowed: float
) -> Finding:
    everything = len(late) == judged
    hit = telling(attempt.step for attempt in late)
    scale = f"; its scale went {history(way)}" if len(set(way)) > 1 else f" at a scale of {history(way)}" if way else ""
    before = tried - judged
    adapted = f" after the first {several(before, 'update')}, in which its scale came down" if before else ""
    cause, fix = _why(run, late, everything, way)
    what = (
        f"the GradScaler skipped all {several(judged, 'update')} of {name!r}"
        if everything
        else f"the GradScaler skipped {len(late)} of {several(judged, 'update')} of {name!r}{adapted}"
    )
    return Finding(
        rule="skipped-updates",
        seen=f"{what}{_where(run, late)} ({at(hit)}; {100 * len(late) / judged:.0f} %, at most {100 * allowed:g} % are "
        f"allowed){scale}",
        cause=cause,
        fix=fix,
        steps=hit,
        evidence={"updates": judged, "skipped": len(late), "scales": tuple(way)},
    )


def _vanished(run: Evidence, name: str, tried: int, skipped: list[Attempt], way: list[float]) -> Finding:
    hit = telling(attempt.step for attempt in skipped)
    cause, fix = _why(run, skipped, len(skipped) == tried, way)
    return Finding(
        rule="skipped-updates",
        seen=f"the loss scale fell to {scale_of(way[-1])}, below 1, where it makes nothing larger any more "
        f"({history(way)}): the GradScaler skipped {len(skipped)} of {several(tried, 'update')} of {name!r}"
        f"{_where(run, skipped)} ({at(hit)})",
        cause=cause,
        fix=fix,
        steps=hit,
        evidence={"updates": tried, "skipped": len(skipped), "scales": tuple(way)},
    )


def _where(run: Evidence, late: list[Attempt]) -> str:
    """Say in which gradients the scaler found NaN or Inf, where that is not all of them."""
    bad: set[int] = set()
    graded: set[int] = set()
    places = {attempt.place for attempt in late}
    last: Unscaling | None = None
    for place, (_, event) in enumerate(run.events):
        if isinstance(event, Unscaling) and event.optimizer == late[0].optimizer:
            last = event
        elif place in places and last is not None and last.norms is not None:
            graded.update(last.graded)
            bad.update(i for i, n in zip(last.graded, last.norms.values(), strict=True) if not math.isfinite(n))
    return f" for NaN or Inf in the gradients of {run.shown(bad)}" if bad and bad != graded else ""


def _why(run: Evidence, late: list[Attempt], everything: bool, way: list[float]) -> tuple[str, str]:
    """Return the cause of skipped updates, and the fix, as far as repeating one of them tells."""
    if raised := _raised_again(run, late[0].scaler):
        return raised
    step = late[-1].step
    made = _made(run, late[-1])
    forward = overflow(made)
    if forward is not None:
        return f"{forward[0]} in step {step}, whatever the scale is", forward[2]
    first = next(iter(made), None)
    if first is not None and first.backward and first.dtype is torch.float16 and not first.nan:
        if everything and not any(b > a for a, b in itertools.pairwise(way)):
            return (
                f"{first} turned finite values into Inf in step {step}: scaled gradients overflow float16 there, and "
                "the scale is still too high",
                "start from a lower scale (init_scale), or run more steps, until it fits",
            )
        grows = any(b > a for a, b in itertools.pairwise(way))
        again = ", again each time the scale has grown" if grows and not everything else ""
        return (
            f"{first} turned finite values into Inf in step {step}: scaled gradients overflow float16 there{again}",
            "let the scale grow less often (growth_interval, 2000 by default), compute this part in float32, or use "
            "bfloat16",
        )
    cause, fix, _ = explain_nonfinite(run, step, at_end=False)
    return cause, fix


def _raised_again(run: Evidence, scaler: str) -> tuple[str, str] | None:
    """See a scale that somebody sets back up after the scaler has lowered it."""
    found = [event for _, event in run.events if isinstance(event, ScalerUpdate) and event.scaler == scaler]
    spans = [(event.before, event.after) for event in found]
    values = [(a.value(), b.value()) for a, b in spans if a is not None and b is not None]
    jumps = [(after, before) for (_, after), (before, _) in itertools.pairwise(values) if before > after]
    if not jumps:
        return None
    low, high = jumps[0]
    return (
        f"the scale was set back up between updates, {several(len(jumps), 'time')} (from {scale_of(low)} to "
        f"{scale_of(high)} the first time), so that it never comes down to what fits: the scaler's state is loaded "
        "again, its update(new_scale) is given a number, or it is built anew",
        "build the scaler once and load its state once, when a run is resumed; call update() without a number",
    )


def _unseen(run: Evidence, every: int, allowed: float) -> Iterator[Finding]:
    """Judge by the scale alone, where a scaler that is not torch's keeps its attempts to itself."""
    due = len(run.records) // every
    skipped = sorted(run.overflows & {record.step for record in run.records if record.skipped})
    steps = [record.step for record in run.records if not record.skipped]
    late = [step for step in skipped if steps and step > steps[0]] if steps else skipped
    if not due or len(late) < FEW or len(late) <= allowed * due:
        return
    way = [record.loss_scale for record in run.records if record.loss_scale is not None]
    yield Finding(
        rule="skipped-updates",
        seen=f"no optimizer stepped in {len(late)} of the {due} steps in which an update was due (every={every}; "
        f"{at(late)}), each time the loss scale fell; it went {history(way)}",
        cause="undecided: NaN or Inf in the gradients, from values beyond float16's 65504 or from an operation outside "
        "of its domain",
        fix="check the batches of these steps, and run one under torch.autograd.detect_anomaly() to see the operation",
        steps=telling(late),
        evidence={"updates": due, "skipped": len(late), "scales": tuple(way)},
    )


class Ahead(NamedTuple):
    """What moved in steps whose updates were skipped, and how often."""

    title: str
    kind: str
    steps: list[int]
    times: int


def moved_on_skipped(run: Evidence) -> Iterator[Finding]:
    """See schedulers and averages that move once an update, also when the scaler skips it."""
    tried: dict[int, list[Attempt]] = {}
    for attempt in attempts(run):
        tried.setdefault(attempt.step, []).append(attempt)
    skipped = {step for step, found in tried.items() if not any(attempt.applied for attempt in found)}
    applied = set(tried) - skipped
    for ahead in (*_schedulers(run, skipped, applied), *_averages(run, skipped, applied)):
        far = ahead.times >= FAR_AHEAD * len(tried)
        yield Finding(
            rule="ahead-of-updates" if far else "moved-on-skipped",
            seen=f"{ahead.title} moved {several(ahead.times, 'time')} in steps whose update the GradScaler skipped "
            f"({at(ahead.steps)}): it is {ahead.times} of {several(len(tried), 'update')} ahead of the weights",
            cause=f"{ahead.kind} also where scaler.step() skips the optimizer's step",
            fix="go on only where the update was made: the scale falls where it was skipped (`before = "
            "scaler.get_scale(); scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)",
            steps=telling(ahead.steps),
            evidence={"ahead": ahead.times, "updates": len(tried)},
        )


def _schedulers(run: Evidence, skipped: set[int], applied: set[int]) -> Iterator[Ahead]:
    for name in run.setup.schedulers:
        moved: dict[int, int] = {}
        for record, event in run.scheduler_steps:
            if event.scheduler == name:
                moved[record.step] = moved.get(record.step, 0) + event.count
        hit = sorted(skipped & moved.keys())
        # one that moves once an epoch may do so after a skipped update too
        if hit and 2 * len(applied & moved.keys()) >= len(applied):
            yield Ahead(f"scheduler {name!r}", "its step() runs once an update,", hit, sum(moved[step] for step in hit))


def _averages(run: Evidence, skipped: set[int], applied: set[int]) -> Iterator[Ahead]:
    moved: dict[str, set[int]] = {}
    for record, event in run.events:
        if isinstance(event, StateMoved):
            for name in event.names:
                moved.setdefault(name, set()).add(record.step)
    for name, steps in moved.items():
        hit = sorted(skipped & steps)
        if hit and 2 * len(applied & steps) >= len(applied):
            kind = type(run.setup.state[name]).__name__ if name in run.setup.state else "average"
            yield Ahead(f"setup.state[{name!r}] ({kind})", "it is updated once an update,", hit, len(hit))
