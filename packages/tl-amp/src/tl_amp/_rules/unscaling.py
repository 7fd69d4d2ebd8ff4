"""Rules about the order of backward(), unscale_() and update()."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tl_amp._acts import Unscaled, attempts, fresh, own_scalers, passes, scaler_updates, unscalings
from tl_amp._words import at, quoted, scale_of, several, telling, together
from tl_core import Finding
from tl_telemetry import Backward, Evidence, GradientsCleared


def unscaled_again(run: Evidence) -> Iterator[Finding]:
    """See gradients that are divided by the scale again with each further micro-batch of an accumulation."""
    tried = attempts(run)
    by_optimizer: dict[str, list[Unscaled]] = {}
    for unscaled in unscalings(run):
        by_optimizer.setdefault(unscaled.event.optimizer, []).append(unscaled)
    for name, found in by_optimizer.items():
        places = [attempt.place for attempt in tried if attempt.optimizer == name]
        again: list[Unscaled] = []
        longest = times = 1
        for before, now in itertools.pairwise(found):
            held = set(fresh(run, before.event)) & set(fresh(run, now.event))
            stepped = any(before.place < place < now.place for place in places)
            times = times + 1 if held and not stepped else 1
            longest = max(longest, times)
            if times > 1:
                again.append(now)
        if not again:
            continue
        sites = together(unscaled.event.site for unscaled in again)
        hit = telling(unscaled.step for unscaled in again)
        scale = again[0].scale
        early = [pair for pair in itertools.pairwise(found) if pair[1] in again and not _added(run, *pair)]
        if early and all(_others_stepped(run, *pair) for pair in early) and len(early) == len(again):
            continue  # update-between-steps tells it
        if len(early) == len(again):
            yield _forgotten(run, name, early, len(found))
            continue
        by = " * ".join([scale_of(scale)] * longest) if longest < 4 else f"{scale_of(scale)} ** {longest}"
        yield Finding(
            rule="unscaled-again",
            seen=f"scaler.unscale_() at {sites} divided gradients of {name!r} by the scale that it had divided already "
            f"({len(again)} of {several(len(found), 'call')}, {at(hit)}): no update had used them, and a further "
            "backward pass had added to them",
            cause="unscale_() runs on every micro-batch of an accumulation, which update() allows: the gradients of "
            f"earlier micro-batches are divided again each time, the first one's by {by} instead of "
            f"{scale_of(scale)}, and vanish",
            fix="call unscale_(), clip, scaler.step() and scaler.update() once an update, after the last micro-batch's "
            "backward()",
            steps=hit,
            parameters=run.named({i for unscaled in again for i in unscaled.event.graded}),
            evidence={"calls": len(found), "again": len(again), "times": longest, "scale": scale},
        )


def _others_stepped(run: Evidence, before: Unscaled, now: Unscaled) -> bool:
    """Tell whether another optimizer was stepped between two unscalings and before the scale's update."""
    updates = [updated.place for updated in scaler_updates(run) if before.place < updated.place < now.place]
    return any(
        before.place < attempt.place < place and attempt.optimizer != now.event.optimizer
        for attempt in attempts(run)
        for place in updates[:1]
    )


def _added(run: Evidence, before: Unscaled, now: Unscaled) -> bool:
    """Tell whether a backward pass added to the gradients between two unscalings."""
    graded = set(now.event.graded)
    between = (event for _, event in run.events[before.place : now.place])
    return any(isinstance(event, Backward) and not graded.isdisjoint(event.filled) for event in between)


def _forgotten(run: Evidence, name: str, pairs: list[tuple[Unscaled, Unscaled]], calls: int) -> Finding:
    first, second = pairs[0]
    sites = together(
        updated.event.site
        for updated in scaler_updates(run)
        if any(before.place < updated.place < now.place for before, now in pairs)
    )
    by = "scaler.step()" if second.event.in_step else "scaler.unscale_()"
    hit = telling(now.step for _, now in pairs)
    scale = scale_of(second.scale)
    return Finding(
        rule="unscaled-again",
        seen=f"{by} at {second.event.site} divided the gradients of {name!r} by {scale} again, which scaler.unscale_() "
        f"at {first.event.site} had divided already, without a backward pass in between ({len(pairs)} of "
        f"{several(calls, 'unscaling')}, {at(hit)})",
        cause=f"scaler.update() at {sites} came between them: the scaler forgets with it what it has unscaled, and the "
        f"gradients become {scale} times too small",
        fix=f"move scaler.update() from {sites} to after scaler.step() of all optimizers",
        steps=hit,
        parameters=run.named({i for _, now in pairs for i in now.event.graded}),
        evidence={"calls": calls, "again": len(pairs), "times": 2, "scale": second.scale},
    )


def missing_update(run: Evidence) -> Iterator[Finding]:
    """See scalers that step optimizers again and again and are never updated."""
    for scaler in sorted(own_scalers(run)):
        tried = [attempt for attempt in attempts(run) if attempt.scaler == scaler]
        updates = [updated for updated in scaler_updates(run) if updated.event.scaler == scaler]
        if updates or len(tried) < 3 or len({attempt.step for attempt in tried}) < 3:
            continue
        hit = telling(attempt.step for attempt in tried)
        yield Finding(
            rule="missing-update",
            seen=f"scaler.step() was called {several(len(tried), 'time')} ({together(a.site for a in tried)}, "
            f"{at(hit)}), and scaler.update() never",
            cause="update() is missing: the scale never adapts, and the scaler keeps what it found out about each "
            "optimizer's gradients",
            fix="call scaler.update() once an update, after all optimizers have stepped",
            steps=hit[:3],
            evidence={"attempts": len(tried)},
        )


def update_between_steps(run: Evidence) -> Iterator[Finding]:
    """See updates of the scale between the steps of two optimizers with gradients of one backward pass."""
    known = passes(run)
    tried = attempts(run)
    updates = scaler_updates(run)
    found = unscalings(run)
    hits: list[tuple[Unscaled, str, str]] = []
    for unscaled in found:
        places = [known[number].place for number in fresh(run, unscaled.event) if number in known]
        if not places:
            continue
        last = max(places)
        others = [a for a in tried if last < a.place < unscaled.place and a.optimizer != unscaled.event.optimizer]
        between = [
            updated
            for updated in updates
            if updated.event.scaler == unscaled.event.scaler
            and last < updated.place < unscaled.place
            and any(attempt.place < updated.place for attempt in others)
        ]
        cleared = any(
            isinstance(event, GradientsCleared) and not set(event.cleared).isdisjoint(unscaled.event.graded)
            for _, event in run.events[last : unscaled.place]
        )
        if between and not cleared:
            hits.append((unscaled, between[0].event.site, together(attempt.optimizer for attempt in others)))
    if not hits:
        return
    late = quoted(unscaled.event.optimizer for unscaled, _, _ in hits)
    early = quoted(name for _, _, names in hits for name in names.split(" and "))
    sites = together(site for _, site, _ in hits if site)
    hit = telling(unscaled.step for unscaled, _, _ in hits)
    yield Finding(
        rule="update-between-steps",
        seen=f"scaler.update(){' at ' + sites if sites else ''} ran after {early} had stepped and before {late} did, "
        f"with gradients of the same backward pass ({several(len(hits), 'time')}, {at(hit)})",
        cause=f"update() between two optimizers' steps: {_harm(run, late, [unscaled for unscaled, _, _ in hits])}",
        fix="call scaler.step() for every optimizer first, then scaler.update() once",
        steps=hit,
        parameters=run.named({i for unscaled, _, _ in hits for i in unscaled.event.graded}),
        evidence={"times": len(hits)},
    )


def _harm(run: Evidence, late: str, hits: list[Unscaled]) -> str:
    """Say what an update() before their step does to gradients."""
    for unscaled in hits:
        before = [
            one
            for one in unscalings(run)
            if one.event.optimizer == unscaled.event.optimizer and one.place < unscaled.place
        ]
        if before and not _added(run, before[-1], unscaled):
            return (
                f"the scaler forgets with it that unscale_() at {before[-1].event.site} has divided the gradients of "
                f"{late}, and divides them by the scale again"
            )
    return (
        f"where it changes the scale, the gradients of {late} are divided by another scale than their loss was "
        "multiplied by, and an overflow that only they have is judged one update late"
    )
