"""The rule about gradients that are thrown away instead of accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import Backward
from tl_telemetry._evidence import Evidence, at, fresh_passes, several, telling

# Fewer discarded passes than this may be a guard that skips bad batches.
FEWEST = 4


def discarded_gradient(run: Evidence) -> Iterator[Finding]:
    """See a loss whose gradients are cleared in step after step without an update, and used only now and then."""
    used = {number for _, event in run.steps for number in fresh_passes(event)}
    pending = run.facts.recorder.gradients.held_passes()
    updating = {record.step for record, _ in run.steps}
    sites: dict[str, list[tuple[int, Backward]]] = {}
    for record, event in run.backwards.values():
        if not run.held.isdisjoint(event.filled):
            sites.setdefault(event.site, []).append((record.step, event))
    for site, passes in sites.items():
        applied = [step for step, event in passes if event.number in used]
        discarded = [
            step
            for step, event in passes
            if event.number not in used
            and event.number not in pending
            and step not in updating
            and step not in run.overflows
        ]
        if len(applied) < 2 or len(discarded) < max(FEWEST, len(applied)):
            continue
        period = f": one in {len(passes) // len(applied)} was used" if len(passes) >= 2 * len(applied) else ""
        yield Finding(
            rule="discarded-gradient",
            seen=f"the gradients of {len(discarded)} of {several(len(passes), 'backward pass')} at {site} were cleared "
            f"before any update used them ({at(discarded)}){period}",
            cause="zero_grad() runs in every micro-batch, while step() runs only at the end of a cycle: nothing "
            "accumulates",
            fix="call zero_grad() once an update, right after step() (or before the cycle's first backward())",
            steps=telling(discarded),
            evidence={"backward_passes": len(passes), "used": len(applied), "discarded": len(discarded)},
        )
