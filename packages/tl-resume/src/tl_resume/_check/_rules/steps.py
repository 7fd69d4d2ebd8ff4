"""The step to go on from."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._evidence import Evidence


def not_restored(evidence: Evidence) -> Iterator[Finding]:
    """``load`` neither returned nor set the step to go on from, where it is meant to."""
    if not evidence.loop.restores_step:
        return
    returned, index = evidence.resumed.returned, evidence.resumed.step_index
    told = returned if isinstance(returned, int) and not isinstance(returned, bool) else index
    if told == evidence.resume_at:
        return
    how = f"load() returned {returned!r}" if told is returned else f"load() left setup.step_index at {index}"
    if told == evidence.resume_at - 1:
        effect = f"step {told}, which was done before saving, would run again"
    elif told == 0:
        effect = "the run would start again from step 0, its schedule and its data with it"
    else:
        effect = f"the run would go on from step {told}"
    yield Finding(
        "step-not-restored",
        f"{how}, and the run that saved had {evidence.resume_at} steps behind it: {effect}",
        "the step to go on from is not in the checkpoint, or is counted otherwise",
        "save setup.step_index (the number of steps that are done) and return it from load(), or set it there",
        steps=(evidence.resume_at,),
        evidence={"is_cause": evidence.diverged is None},
    )
