"""Rules about gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import Clip
from tl_telemetry._evidence import Evidence, at, number, several, telling
from tl_telemetry._record import total

# From this share of clipped updates on, a clip is the rule rather than the exception.
NEARLY_EVERY = 0.9


def clip_after_step(run: Evidence) -> Iterator[Finding]:
    """See gradients that are clipped when an update has used them already."""
    clipped_in_time = {i for _, clip in run.clips if _finite(clip) for i in set(clip.graded) - set(clip.used)}
    for (function, site), calls in run.clips_by_site.items():
        late = [(r, c) for r, c in calls if _finite(c) and c.graded and set(c.used) == set(c.graded)]
        used = {i for _, clip in late for i in clip.used}
        if not late or len(late) * 3 < len(calls) * 2 or not used.isdisjoint(clipped_in_time):
            continue
        hit = telling(record.step for record, _ in late)
        record, clip = max(late, key=lambda pair: total(pair[1].norms.values()))
        yield Finding(
            rule="clip-after-step",
            seen=f"{function}() at {site} clipped gradients that an update had used already ({len(late)} of "
            f"{several(len(calls), 'call')}, {at(hit)}): the update of step {record.step} applied a norm of "
            f"{number(total(clip.norms.values()))} unclipped, with a bound of {clip.bound:g}",
            cause="the clip comes after optimizer.step()",
            fix="clip between backward() and optimizer.step() (with a GradScaler: after scaler.unscale_(optimizer))",
            steps=hit,
            parameters=run.named(used),
            evidence={"calls": len(calls), "after_step": len(late)},
        )


def clip_misses(run: Evidence) -> Iterator[Finding]:
    """See clips that touch none of the gradients that are stepped."""
    stepped = {i for _, event in run.steps for i in event.graded}
    if not stepped:
        return  # no update had a gradient: other rules say why, and there was nothing to clip
    for (function, site), calls in run.clips_by_site.items():
        finite = [(record, clip) for record, clip in calls if _finite(clip)]
        if not finite or any(not set(clip.graded).isdisjoint(stepped) for _, clip in finite):
            continue
        followed = {i for _, clip in finite for i in clip.followed}
        given = max(clip.given for _, clip in finite)
        graded = {i for _, clip in finite for i in clip.graded}
        if not followed.isdisjoint(stepped):
            what = f"none of its {several(given, 'tensor')} had a gradient at that time"
            cause = "it runs before backward(), or after zero_grad(): there is nothing to clip yet"
            fix = "clip between backward() and optimizer.step()"
        else:
            whose = run.shown(followed) if followed else "tensors that are neither the model's nor an optimizer's"
            state = "which no optimizer stepped" if graded else "which had no gradient"
            what = f"it covers only {whose}, {state}; what was stepped is {run.shown(stepped)}"
            cause = "the clip is given other parameters than those that are trained"
            fix = "pass the trained parameters, for example model.parameters()"
        hit = telling(record.step for record, _ in finite)
        yield Finding(
            rule="clip-misses",
            seen=f"{function}() at {site} clipped none of the stepped gradients: {what} ({several(len(finite), 'call')}, {at(hit)})",
            cause=cause,
            fix=fix,
            steps=hit,
            parameters=run.named(followed),
            evidence={"calls": len(finite), "given": given, "with_gradient": len(graded)},
        )


def clip_every_update(run: Evidence) -> Iterator[Finding]:
    """Note clips that nearly every update runs into."""
    for (function, site), calls in run.clips_by_site.items():
        if function == "clip_grad_value_":
            continue
        before = [(record.step, clip, _norm(clip)) for record, clip in calls if _finite(clip) and clip.graded]
        over = [(step, norm) for step, clip, norm in before if norm > clip.bound]
        if len(before) < 5 or len(over) < NEARLY_EVERY * len(before):
            continue
        norms = sorted(norm for _, norm in over)
        yield Finding(
            rule="clip-every-update",
            seen=f"{function}() at {site} clipped {len(over)} of {several(len(before), 'update')} to {before[0][1].bound:g}: the "
            f"norm before was {number(norms[0])} to {number(norms[-1])}, {number(norms[len(norms) // 2])} in the median "
            f"({at(step for step, _ in over)})",
            cause="the bound is far below the usual norm, so that every update has the same length; or the gradients are too "
            "large (targets or losses on an unusual scale)",
            fix="nothing, if a tight bound is meant; else normalise the targets, or raise the bound; max_grad_norm= makes "
            "a norm before clipping that is too large a finding",
            steps=telling(step for step, _ in over),
            evidence={"updates": len(before), "clipped": len(over), "median_norm": norms[len(norms) // 2]},
        )


def _finite(clip: Clip) -> bool:
    """Tell whether the clip has a bound; with an infinite one, people only measure."""
    return math.isfinite(clip.bound)


def _norm(clip: Clip) -> float:
    return total(clip.norms.values()) / (1.0 if clip.scale is None else clip.scale.value())
