"""The verdict: findings, notes, and what could not be judged."""

from __future__ import annotations

from tl_accum._compare import Comparison
from tl_accum._report import AccumulationReport, tables
from tl_accum._rules import gradient_findings, last_group, moved_between, notes, state_findings, timing_findings
from tl_core import Finding

CHECK = "Gradient accumulation"


def judge(found: Comparison, frozen: Comparison | None, allowed: frozenset[str]) -> AccumulationReport:
    """Return the verdict.

    Args:
        found: both runs.
        frozen: both runs with fixed statistics, where they differ and the model has some.
        allowed: ids of rules that are allowed to be broken.
    """
    decisive = found if frozen is None else frozen
    every = _findings(decisive)
    findings = tuple(finding for finding in every if finding.rule not in allowed)
    told = list(notes(decisive, told=bool(every)))
    if frozen is not None:
        told.append(_statistics(frozen, judged=bool(findings)))
    told = [note for note in told if note.rule not in allowed]
    unjudged = any(note.rule == "not-judged" for note in told)
    if len(findings) < len(every):
        told.append(_permitted(tuple(finding for finding in every if finding.rule in allowed)))
    plan = found.plan
    return AccumulationReport(
        CHECK,
        findings,
        tuple(told),
        detail=tables(decisive) if findings else "",
        judged=bool(findings) or not unjudged,
        accumulation_steps=plan.accumulation_steps,
        cycles=len(plan.groups),
        diverged_at=next((gap.number for gap in decisive.gaps if not gap.agrees), None),
        noise=decisive.noise,
        data_form=plan.data_form,
    )


def _findings(comparison: Comparison) -> list[Finding]:
    """Return what was found, causes before their consequences."""
    if comparison.moved_by_hand:
        return []  # there are updates, and they cannot be seen
    found = [*timing_findings(comparison), *last_group(comparison)]
    if not comparison.too_noisy:
        found += moved_between(comparison)
        gradients = list(gradient_findings(comparison)) if not found else []
        state = list(state_findings(comparison, told=bool(found or gradients)))
        # undecided gradients are explained by what else an update uses, and that moves otherwise
        found += [finding for finding in gradients if not (state and finding.rule == "gradients-differ")]
        known = {finding.evidence.get("state") for finding in gradients} - {None}
        found += [finding for finding in state if finding.evidence.get("state") not in known]
    return found


def _permitted(permitted: tuple[Finding, ...]) -> Finding:
    """Say what was found and is allowed: what would follow from it could not be told from other mistakes."""
    rules = ", ".join(dict.fromkeys(finding.rule for finding in permitted))
    return Finding(
        "not-judged",
        f"allowed, and found: {rules}. {permitted[0].seen}. Whether something else makes these updates differ was not "
        "judged",
        "",
        "",
    )


def _statistics(frozen: Comparison, *, judged: bool) -> Finding:
    """Say which layers cannot be the same for a batch and for its micro-batches."""
    names = [repr(name) if name else type(frozen.run.setup.model).__name__ for name in frozen.frozen.modules]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    layers = f"the layer{'s' if len(names) > 1 else ''} {shown}" if names else "batch_norm(), called as a function,"
    plural = len(names) > 1
    them = "them" if plural else "it"
    normalises = frozen.frozen.batch_norm
    how = "with fixed statistics" if normalises else "in eval mode"
    if judged:
        return Finding(
            "not-judged",
            f"{layers} ran {how} for this comparison: what {'they use or move' if plural else 'it uses or moves'} in "
            "every forward pass differs for a batch and for its micro-batches",
            "",
            "",
        )
    return Finding(
        "not-judged",
        f"{layers} cannot be the same for a batch and for its micro-batches: run {how}, everything agrees",
        "the statistics of each micro-batch are not the full batch's"
        if normalises
        else "something in a forward pass moves a buffer, once for a full batch and once for each micro-batch",
        f"put {them} in eval mode{' (frozen statistics)' if normalises else ''}"
        f"{', or train with GroupNorm or LayerNorm,' if normalises else ''} to have accumulation equal the full batch; "
        "or check the loop with such a model",
    )
