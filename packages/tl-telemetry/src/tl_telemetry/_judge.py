"""From evidence to a report: all rules in order, consequences hidden behind their cause, permissions applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tl_core import Finding, Report
from tl_telemetry._evidence import Evidence, several
from tl_telemetry._record import StepRecord
from tl_telemetry._rule_ids import NOTES
from tl_telemetry._rules import RULES, Rule
from tl_telemetry._table import render

CHECK = "Training run"

# The findings that follow from a rule's, by its id.
Explains = Mapping[str, AbstractSet[str]]

# A finding hides what follows from it, unless that names parameters which the finding does not.
EXPLAINS: Explains = {
    "loss-not-connected": frozenset(
        {"no-gradient", "step-without-gradient", "never-ran", "no-update", "never-stepped"}
    ),
    "zeroed-before-step": frozenset({"zero-gradient", "step-without-gradient", "no-update", "skipped-update"}),
    "no-gradient": frozenset({"step-without-gradient", "zero-gradient"}),
    "other-copy": frozenset({"step-without-gradient", "never-stepped", "no-gradient", "never-ran"}),
    "foreign-tensor": frozenset({"step-without-gradient"}),
    "replaced-layer": frozenset({"step-without-gradient", "no-gradient", "never-ran"}),
    "missing-zero-grad": frozenset({"repeated-step", "leaked-gradient", "diverging"}),
    "stepped-by-two": frozenset({"several-optimizers", "repeated-step"}),
    "non-finite": frozenset({"diverging", "no-update", "grad-norm-exceeded", "zero-gradient", "loss-not-decreasing"}),
    "frozen-moved": frozenset({"frozen-buffer-moved"}),
    "grad-norm-exceeded": frozenset({"clip-every-update"}),
    "lr-zero": frozenset({"no-update", "skipped-update"}),
    "never-stepped": frozenset({"skipped-update", "scheduler-before-optimizer"}),
    "scheduler-stepped-twice": frozenset({"scheduler-before-optimizer", "torch-warning"}),
    "scheduler-before-optimizer": frozenset({"torch-warning"}),
}


def judge(
    run: Evidence,
    rules: Iterable[Rule] = RULES,
    *,
    check: str = CHECK,
    notes: Iterable[str] = NOTES,
    explains: Explains = EXPLAINS,
) -> Report:
    """Apply the rules; what may be meant is a note, unless ``strict`` names its rule."""
    allow, strict = run.options.allow, run.options.strict
    run.check_patterns()  # a wrong argument is an error of the caller; what a rule raises is one of the rule
    noted = frozenset(notes) - strict
    found = [finding for rule in rules for finding in _look(rule, run) if finding.rule not in allow]
    found = [one for one in found if not _explained(run, one, found, explains)] + list(not_judged(run))
    findings = tuple(finding for finding in found if finding.rule not in noted)
    judged = bool(findings or run.overflows or (run.steps and not run.trains_other))
    return Report(
        check,
        findings,
        tuple(finding for finding in found if finding.rule in noted),
        detail=detail(run.records, findings),
        judged=judged,
    )


def _explained(run: Evidence, finding: Finding, found: Iterable[Finding], explains: Explains) -> bool:
    """Tell whether a finding follows from another one, or only repeats the warning that established its cause."""
    if finding.rule == "torch-warning":
        told = (str(cause.evidence["warning"]).strip() for cause in found if "warning" in cause.evidence)
        if any(finding.seen.endswith(message) for message in told):
            return True
    causes = [cause for cause in found if finding.rule in explains.get(cause.rule, ())]
    # tensors that only an optimizer holds have no names by which two findings could be compared
    bare = {entry.name for entry in run.tensors.entries if entry.owner is None and not entry.in_model}
    named = set(finding.parameters) - bare
    return any(not cause.parameters or named <= set(cause.parameters) for cause in causes)


def _look(rule: Rule, run: Evidence) -> list[Finding]:
    """Apply a rule; one that raises must not take the others' verdict with it."""
    found: list[Finding] = []
    try:
        found.extend(rule(run))
    except Exception as error:  # noqa: BLE001 (whatever it is, the note tells it)
        name = getattr(rule, "__name__", type(rule).__name__)
        found.append(
            Finding(
                "not-judged",
                f"the rule {name} could not look: {type(error).__name__}: {error}",
                "",
                "report it: a rule should look at every loop, or say why it cannot",
            )
        )
    return found


def detail(records: Sequence[StepRecord], findings: tuple[Finding, ...]) -> str:
    """Return the table around the findings' telling steps; nothing without findings."""
    if not findings or not records:
        return ""
    return "Telemetry:\n" + render(records, around={step for finding in findings for step in finding.steps[:3]})


def not_judged(run: Evidence) -> Iterator[Finding]:
    """Say what could not be looked at, and why."""
    if not run.records:
        yield Finding("not-judged", "no step was recorded: nothing could be judged", "", "")
        return
    every = run.options.every
    if every is not None and len(run.records) < every:
        yield Finding(
            "not-judged",
            f"the run ended after {several(len(run.records), 'step')}, before the first update was due "
            f"(every={every}): skipped updates could not be judged",
            "",
            "run at least one whole accumulation cycle",
        )
    losses = sum(record.loss is not None for record in run.records)
    if run.options.min_relative_decrease is not None and losses < 2:
        yield Finding(
            "not-judged",
            f"the run has {several(losses, 'step')} with a loss, at least 2 are needed: whether the loss falls could "
            "not be judged",
            "",
            "run more steps, or return the loss from the step",
        )
    if run.trains_other:
        others = ", ".join(sorted(run.steps_by_optimizer))
        yield Finding(
            "not-judged",
            f"no parameter of this setup was stepped in {run.duration}, while {others} stepped others: the loop trains "
            "something else than what is watched",
            "",
            "watch the very model and optimizers that the loop trains",
        )
    if not run.steps and not run.overflows:
        by_hand = sorted(run.moved & set(run.trainable))
        held = run.facts.recorder.gradients.held_passes() & set(run.backwards)
        beside = ""
        if by_hand:
            beside = f", while the loop moved {run.shown(by_hand)} without one"
        elif held and held == set(run.backwards):
            beside = f", and the gradients still hold all {several(len(held), 'backward pass')}"
        yield Finding(
            "not-judged",
            f"no optimizer stepped in {run.duration}{beside}" + ": what an update shows could not be judged",
            "",
            "" if by_hand else "run at least one whole accumulation cycle",
        )
    if not run.backwards and run.steps and run.graded:
        yield Finding(
            "not-judged",
            "no backward pass was seen, but gradients were there (torch.autograd.grad, torch.func, or a backend of its "
            "own): where gradients come from could not be judged",
            "",
            "",
        )
    if run.steps and all(event.updates is None for _, event in run.steps):
        yield Finding(
            "not-judged",
            "updates were not tracked (track_updates=False): what the steps changed could not be judged",
            "",
            "",
        )
