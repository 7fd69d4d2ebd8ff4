"""The step to go on from."""

from __future__ import annotations

from collections.abc import Iterator

from tl_core import Finding
from tl_resume._check._evidence import Evidence
from tl_resume._check._runs import whole_number
from tl_resume._check._words import parting


def fresh_process(evidence: Evidence) -> Iterator[Finding]:
    """The resumed run is the uninterrupted one in this process, and not in a fresh one."""
    if not evidence.only_elsewhere or evidence.diverged is None:
        return
    yield Finding(
        "fresh-process-differs",
        f"resumed in a fresh process, {parting(evidence.diverged)}; resumed in this process, the run is the "
        "uninterrupted one",
        "not established; the loop depends on something that lives as long as the process: module state that importing "
        "sets, the order of a set of strings (PYTHONHASHSEED), an environment variable, a cache of a library",
        "save that state, or make it the same in every process",
        steps=(evidence.diverged.step,),
        evidence={"is_cause": True},
    )


def not_restored(evidence: Evidence) -> Iterator[Finding]:
    """``load`` neither returned nor set the step to go on from, where it is meant to."""
    if not evidence.loop.restores_step:
        return
    returned, index = evidence.resumed.returned, evidence.resumed.step_index
    given = whole_number(returned)
    told = index if given is None else given
    if told == evidence.resume_at:
        return
    how = f"load() left setup.step_index at {index}" if given is None else f"load() returned {given}"
    if given is None and evidence.resumed.returned is not None:
        how = (
            f"load() returned {evidence.resumed.returned!r:.60}, which is no int, and left setup.step_index at {index}"
        )
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
