"""Rules about optimizers that step past the scaler, or never."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tl_amp._acts import (
    PARTLY,
    SCALED,
    Attempt,
    Stepped,
    Unscaled,
    attempts,
    direct_steps,
    fresh,
    is_scaled,
    known_scales,
    norms_after,
    own_scalers,
    passes,
    scaler_updates,
    total,
    unscalings,
)
from tl_amp._words import at, quoted, scale_of, scales, several, telling, together
from tl_core import Finding
from tl_telemetry import Backward, Clip, Evidence, GradientsCleared, OptimizerStep
from tl_telemetry import never_stepped as telemetry_never_stepped


def stepped_past_scaler(run: Evidence) -> Iterator[Finding]:
    """See optimizers that are stepped directly although their gradients are still multiplied by the scale."""
    if not own_scalers(run):
        return
    hits: dict[str, list[tuple[Stepped, float, str]]] = {}
    for stepped in direct_steps(run):
        scale, where = _scale_left(run, stepped)
        if scale > 1.0:
            hits.setdefault(stepped.event.optimizer, []).append((stepped, scale, where))
    through = [attempt for attempt in attempts(run) if attempt.optimizer not in hits]
    for name, found in hits.items():
        steps = run.steps_by_optimizer.get(name, [])
        sites = together(stepped.event.site for stepped, _, _ in found)
        backwards = together(where for _, _, where in found)
        factor = scales(scale for _, scale, _ in found)
        beside = ""
        if through:
            others = quoted(attempt.optimizer for attempt in through)
            beside = f", while {others} stepped through the scaler ({together(a.site for a in through)})"
        hit = telling(stepped.step for stepped, _, _ in found)
        yield Finding(
            rule="stepped-past-scaler",
            seen=f"{name!r} was stepped directly at {sites} in {len(found)} of {several(len(steps), 'update')} "
            f"({at(hit)}), on the scaled gradients of a loss that the GradScaler had multiplied by {factor} (backward "
            f"at {backwards}){beside}",
            cause=f"optimizer.step() bypasses the scaler: nothing divided the gradients by the scale, so they are "
            f"{factor} times too large, and NaN or Inf in them are applied",
            fix=f"call scaler.step({_variable(name)}) instead of its step() at {sites}, and scaler.update() once after "
            "all optimizers have stepped",
            steps=hit,
            parameters=run.named({i for stepped, _, _ in found for i in stepped.event.graded}),
            evidence={"updates": len(steps), "direct": len(found), "scale": max(scale for _, scale, _ in found)},
        )


def stepped_after_unscaling(run: Evidence) -> Iterator[Finding]:
    """See optimizers that the scaler unscales, and that are then stepped without it."""
    through = {attempt.optimizer for attempt in attempts(run)}
    steps = direct_steps(run)
    explicit: dict[str, list[Unscaled]] = {}
    for unscaled in unscalings(run):
        if not unscaled.event.in_step and unscaled.event.optimizer not in through:
            explicit.setdefault(unscaled.event.optimizer, []).append(unscaled)
    for name, found in explicit.items():
        own = [stepped for stepped in steps if stepped.event.optimizer == name]
        places = [unscaled.place for unscaled in found] + [len(run.events)]
        hits = [
            stepped
            for first, last in itertools.pairwise(places)
            if (stepped := next((s for s in own if first < s.place < last), None)) is not None
        ]
        if len(hits) < len(found):
            continue  # some updates are left out, as by a guard of the loop's own against NaN and Inf
        sites = together(stepped.event.site for stepped in hits)
        hit = telling(stepped.step for stepped in hits)
        yield Finding(
            rule="stepped-past-scaler",
            seen=f"{name!r} was stepped directly at {sites} in {len(hits)} of {several(len(own), 'update')} "
            f"({at(hit)}), after scaler.unscale_() at {together(u.event.site for u in found)}, and never through the "
            "scaler",
            cause="optimizer.step() bypasses the scaler: unscale_() only notes the NaN and Inf that it finds, and it "
            "is scaler.step() that skips an update because of them; a direct step applies them",
            fix=f"call scaler.step({_variable(name)}) instead of its step() at {sites}",
            steps=hit,
            parameters=run.named({i for stepped in hits for i in stepped.event.graded}),
            evidence={"updates": len(own), "direct": len(hits)},
        )


def stepped_besides(run: Evidence) -> Iterator[Finding]:
    """See optimizers that are stepped through the scaler, and directly as well."""
    tried = attempts(run)
    hits: dict[str, list[tuple[Stepped, str]]] = {}
    for stepped in direct_steps(run):
        event = stepped.event
        earlier = [a for a in tried if a.optimizer == event.optimizer and a.place < stepped.place]
        # a skipped step leaves its gradients, as NaN and Inf, to the direct one
        if earlier and not event.closure and not _filled_between(run, event.graded, earlier[-1].place, stepped.place):
            hits.setdefault(event.optimizer, []).append((stepped, earlier[-1].site))
    for name, found in hits.items():
        sites = together(stepped.event.site for stepped, _ in found)
        hit = telling(stepped.step for stepped, _ in found)
        yield Finding(
            rule="stepped-twice",
            seen=f"{name!r} was stepped through the scaler at {together(site for _, site in found)} and directly at "
            f"{sites}, without a backward pass in between ({several(len(found), 'time')}, {at(hit)})",
            cause="scaler.step() steps the optimizer by itself: a further optimizer.step() applies the same gradients "
            "twice, and NaN or Inf where the scaler skipped them",
            fix=f"remove the optimizer.step() at {sites}",
            steps=hit,
            parameters=run.named({i for stepped, _ in found for i in stepped.event.graded}),
            evidence={"times": len(found)},
        )


def stepped_again(run: Evidence) -> Iterator[Finding]:
    """See optimizers that the scaler steps once more with the gradients of its last step."""
    hits: dict[str, list[tuple[Attempt, Attempt]]] = {}
    last: dict[str, Attempt] = {}
    for attempt in attempts(run):
        before = last.get(attempt.optimizer)
        event = run.events[attempt.place][1]
        if (
            before is not None
            and before.applied
            and isinstance(event, OptimizerStep)
            and not _filled_between(run, event.graded, before.place, attempt.place)
            and any(norm > 0.0 for norm in event.norms.values())
        ):
            hits.setdefault(attempt.optimizer, []).append((before, attempt))
        last[attempt.optimizer] = attempt
    for name, found in hits.items():
        first, second = (together(pair[i].site for pair in found) for i in (0, 1))
        where = f"at {first} and again at {second}" if first != second else f"again and again at {first}"
        hit = telling(attempt.step for _, attempt in found)
        yield Finding(
            rule="stepped-twice",
            seen=f"{name!r} was stepped through the scaler {where}, without a backward pass in between "
            f"({several(len(found), 'time')}, {at(hit)})",
            cause="the gradients of the first of these updates are still there: the scaler divides them by the scale "
            "once more, and they are applied again",
            fix=f"call scaler.step({_variable(name)}) once for each backward pass",
            steps=hit,
            evidence={"times": len(found)},
        )


def _filled_between(run: Evidence, graded: tuple[int, ...], first: int, last: int) -> bool:
    """Tell whether gradients are new since an attempt: from a backward pass, put there by hand, or gone."""
    held = set(graded)
    return not held or any(
        (isinstance(event, Backward) and not held.isdisjoint(event.filled))
        or (isinstance(event, GradientsCleared) and not held.isdisjoint((*event.cleared, *event.edited)))
        for _, event in run.events[first:last]
    )


def _variable(name: str) -> str:
    return "optimizer" if not name.isidentifier() else name


def _scale_left(run: Evidence, stepped: Stepped) -> tuple[float, str]:
    """Return the scale that the gradients of a direct step still held (1: none), and the line of their backward."""
    event = stepped.event
    numbers = fresh(run, event)
    known = passes(run)
    scaled = [
        known[n] for n in numbers if n in known and is_scaled(known[n].event, known_scales(run)) in (SCALED, PARTLY)
    ]
    if not scaled:
        return 1.0, ""
    last = scaled[-1]
    for unscaled in unscalings(run):
        if last.place < unscaled.place < stepped.place and unscaled.event.optimizer == event.optimizer:
            return 1.0, ""
    scale = _scale_before(run, last.place, stepped.step)
    if _divided_by_hand(run, stepped, last.place, scale):
        return 1.0, ""
    return scale, last.event.site


def _scale_before(run: Evidence, place: int, step: int) -> float:
    """Return the scale that a backward pass was scaled with."""
    later = [updated for updated in scaler_updates(run) if updated.place > place and updated.event.before is not None]
    if later and later[0].event.before is not None:
        return later[0].event.before.value()
    value = run.records[step].loss_scale if step < len(run.records) else None
    return max(known_scales(run), default=math.nan) if value is None else value


def _divided_by_hand(run: Evidence, stepped: Stepped, place: int, scale: float) -> bool:
    """Tell whether somebody made the gradients about as much smaller as the scale had made them larger."""
    passed = run.events[place][1]
    before = norms_after(passed) if isinstance(passed, Backward) else {}
    graded = dict(zip(stepped.event.graded, stepped.event.norms.values(), strict=True))
    for _, event in run.events[place : stepped.place]:
        if isinstance(event, Clip) and not set(event.graded).isdisjoint(graded):
            graded = dict(zip(event.graded, event.norms.values(), strict=True))  # as they were before the clip
            break
    shared = [i for i in graded if i in before]
    earlier, now = total(before[i] for i in shared), total(graded[i] for i in shared)
    return bool(shared) and math.isfinite(earlier) and now * math.sqrt(scale) < earlier


def unused_scaler(run: Evidence) -> Iterator[Finding]:
    """See an enabled scaler that the loop neither scales, nor steps, nor updates with."""
    own = own_scalers(run)
    if not own or run.stranger_scalers or attempts(run) or unscalings(run) or scaler_updates(run):
        return
    direct = direct_steps(run)
    found = {is_scaled(passed.event, known_scales(run)) for passed in passes(run).values()}
    if not direct or not found or found & {SCALED, PARTLY, None}:
        return
    sites = together(stepped.event.site for stepped in direct)
    float16 = any(str(dtype) == "torch.float16" for dtype in run.autocast)
    yield Finding(
        rule="unused-scaler",
        seen=f"the setup has an enabled GradScaler, and the loop never used it in {run.duration}: no loss was scaled, "
        f"and {quoted(s.event.optimizer for s in direct)} stepped without it ({sites})",
        cause="scaler.scale(loss) and scaler.step(optimizer) are missing"
        + (
            ": gradients below 6e-8, the smallest float16 number, become 0 on their way through float16 operations"
            if float16
            else ""
        ),
        fix="write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(); where none is needed "
        "(bfloat16, float32), leave the scaler out of the setup, or build it with enabled=False",
        steps=telling(stepped.step for stepped in direct)[:3],
        evidence={"updates": len(direct)},
    )


def never_stepped(run: Evidence) -> Iterator[Finding]:
    """See optimizers that never step, and say which ones the scaler steps instead."""
    through = attempts(run)
    for finding in telemetry_never_stepped(run):
        name = str(finding.evidence["optimizer"])
        others = [attempt for attempt in through if attempt.optimizer != name]
        if any(attempt.optimizer == name for attempt in through):
            continue  # the scaler was asked to step it, and skipped it: another rule tells that
        if not others:
            yield _stuck(run, finding)
            continue
        sites = together(attempt.site for attempt in others)
        yield replace(
            finding,
            cause=f"scaler.step() is called for {quoted(a.optimizer for a in others)} only ({sites})",
            fix=f"call scaler.step({_variable(name)}) as well, before the one scaler.update() of the step",
        )


def _stuck(run: Evidence, finding: Finding) -> Finding:
    """See loops whose own guard returns before the scaler could lower its scale."""
    norms = [norm for passed in passes(run).values() for norm in norms_after(passed.event).values()]
    bad = [passed for passed in passes(run).values() if any(map(_not_finite, norms_after(passed.event).values()))]
    if not norms or len(bad) < len(passes(run)) or not own_scalers(run) or scaler_updates(run):
        return (
            _through_the_scaler(finding) if own_scalers(run) and (scaler_updates(run) or unscalings(run)) else finding
        )
    scale = run.records[-1].loss_scale
    return replace(
        finding,
        cause=f"the gradients held Inf or NaN after each of {several(len(bad), 'backward pass')}"
        + ("" if scale is None else f", at a scale of {scale_of(scale)}")
        + ", and the loop left before scaler.step() and scaler.update(): nothing lowers the scale",
        fix="leave the guard to the scaler: call scaler.step() and scaler.update() in every update; it skips the step "
        "and lowers its scale",
    )


def _not_finite(value: float) -> bool:
    return not math.isfinite(value)


def _through_the_scaler(finding: Finding) -> Finding:
    """Say scaler.step() where a finding says step()."""
    name = finding.seen.split("'")[1]
    return replace(
        finding,
        cause=finding.cause.replace("step() is not called on this optimizer", "scaler.step() is not called for it"),
        fix=finding.fix.replace(f"call step() on {name!r}", f"call scaler.step({_variable(name)})"),
    )
