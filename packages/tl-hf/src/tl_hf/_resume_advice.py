"""What the resume check finds, in the words and with the remedies of a Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import Trainer
from transformers.trainer_callback import ExportableState

from tl_core import Finding
from tl_hf._batches import RepeatedBatches
from tl_hf._exported import PLAINLY
from tl_hf._setup import own_callbacks
from tl_hf._words import in_words

if TYPE_CHECKING:
    from tl_resume import ResumeReport

_NOT_SAVED = frozenset(
    {"optimizer-state-not-restored", "param-groups-not-restored", "scheduler-not-restored", "rng-not-restored"}
)


def undecided(report: ResumeReport) -> bool:
    """Tell whether trainings part without a cause that shows."""
    return any(finding.rule == "resume-diverges" for finding in report.findings)


def advised(report: ResumeReport, trainer: Trainer, same: RepeatedBatches | None) -> ResumeReport:
    """Return the report with what a Trainer's training does and needs.

    Args:
        report: the report of the check.
        trainer: a Trainer as they were trained.
        same: the batches with which the resumed training is the uninterrupted one, where that was established.
    """
    findings = _without_repetition(report.findings, trainer)
    return replace(
        report,
        findings=tuple(_advised(finding, trainer, same) for finding in findings),
        notes=tuple(_advised_note(note, trainer) for note in report.notes),
    )


def _without_repetition(findings: tuple[Finding, ...], trainer: Trainer) -> tuple[Finding, ...]:
    """Make one finding of what is missing because the Trainer saves only the model."""
    missing = [f for f in findings if f.rule in (*_NOT_SAVED, "resume-diverges")]
    if not trainer.args.save_only_model or len(missing) < 2:
        return findings
    first = missing[0]
    others = ", ".join(finding.rule for finding in missing[1:])
    steps = tuple(sorted({step for finding in missing for step in finding.steps}))
    one = replace(first, seen=f"{first.seen}; and {others}", steps=steps)
    return tuple(one if finding is first else finding for finding in findings if finding not in missing[1:])


def _advised(finding: Finding, trainer: Trainer, same: RepeatedBatches | None) -> Finding:
    told = in_words(finding, trainer)
    args = trainer.args
    if finding.rule == "resume-diverges" and same is not None:
        return _batches_differ(finding, trainer, same)
    if finding.rule in (*_NOT_SAVED, "resume-diverges") and args.save_only_model:
        return replace(
            told,
            cause="save_only_model=True leaves optimizer, scheduler and random numbers out of the checkpoint",
            fix="set save_only_model=False for checkpoints that a training resumes from",
        )
    if finding.rule == "data-position-not-restored" and args.ignore_data_skip:
        return replace(
            told,
            cause="ignore_data_skip=True: the resumed training begins the epoch anew instead of going on in it",
            fix="set ignore_data_skip=False",
        )
    if finding.rule == "data-position-not-restored":
        return replace(told, fix=_BY_EPOCH)
    if (name := _callback(finding, trainer)) is not None:
        return replace(told, cause=_callback_cause(trainer, name), fix=_callback_fix(trainer, name))
    if finding.rule == "attribute-not-restored" and finding.evidence.get("piece") == "setup.trainer":
        return replace(told, cause=f"{_NOTHING_OF} attributes that a class of one's own gives the Trainer", fix=_KEEP)
    if finding.rule == "outside-state-not-restored":
        return replace(told, cause=f"{_NOTHING_OF} what lies outside of the Trainer", fix=_KEEP)
    return told


_BY_EPOCH = (
    "make the order of the examples a function of the epoch, not of the global generators: a generator that is seeded "
    "with it (set_epoch() of the sampler or the dataset, or args.data_seed); a resumed Trainer draws the batches of "
    "its epoch again, up to the checkpoint's"
)
_NOTHING_OF = "training changes it, and a checkpoint holds nothing of"
_KEEP = (
    "keep it in a TrainerCallback that is an ExportableState, which the checkpoint holds (with "
    "restore_callback_states_from_checkpoint=True), or compute it from state.global_step"
)


def _advised_note(note: Finding, trainer: Trainer) -> Finding:
    told = in_words(note, trainer)
    if "exported" in note.evidence:
        return told
    if note.rule != "unsaved-attribute":
        return told
    if (name := _callback(note, trainer)) is not None:
        return replace(told, fix=f"nothing if training does not use it; else {_callback_fix(trainer, name)}")
    return replace(told, fix=f"nothing if training does not use it; else {_KEEP}")


def _callback(finding: Finding, trainer: Trainer) -> str | None:
    """Return the name of the callback whose state was lost."""
    piece = str(finding.evidence.get("piece", ""))
    if finding.rule not in ("attribute-not-restored", "unsaved-attribute"):
        return None
    return next((name for name in own_callbacks(trainer) if piece == f"setup.{name}"), None)


def _callback_cause(trainer: Trainer, name: str) -> str:
    if isinstance(own_callbacks(trainer)[name], ExportableState):
        if not trainer.args.restore_callback_states_from_checkpoint:
            return (
                "the checkpoint holds what state() of the callback returns, and the resumed Trainer does not look at it"
            )
        return "state() of the callback does not return it, or its class does not restore it from that"
    return "training changes it, and a checkpoint holds nothing of a callback that is no ExportableState"


def _callback_fix(trainer: Trainer, name: str) -> str:
    if isinstance(own_callbacks(trainer)[name], ExportableState):
        if not trainer.args.restore_callback_states_from_checkpoint:
            return "set restore_callback_states_from_checkpoint=True in TrainingArguments"
        return f"have state() return it {PLAINLY}"
    return (
        f"derive {type(own_callbacks(trainer)[name]).__name__} from ExportableState too, have state() return it "
        f"{PLAINLY}, and set restore_callback_states_from_checkpoint=True; or write it to a file beside the "
        "checkpoint in on_save() and read it in on_train_begin()"
    )


def _batches_differ(finding: Finding, trainer: Trainer, same: RepeatedBatches) -> Finding:
    """Say that what the batches hold is what differs."""
    parting = finding.seen.partition("; ")[0]
    seen = f"{parting}; given the batches of the uninterrupted run, the resumed run is equal to it"
    if not same.drew_from:
        return replace(
            finding,
            seen=seen,
            cause="the data give other batches after resuming; left open: random numbers that the dataset or the "
            "collator draws from a generator of its own or in a loader's worker, an order of samples without a seed, "
            "what dataset or collator count",
            fix="make what the dataset and the collator draw, and the order of the examples, a function of the "
            "example and the epoch",
        )
    drawn = " and ".join(f"{name}'s" for name in sorted(same.drew_from))
    return replace(
        finding,
        rule="rng-not-restored",
        seen=f"{seen}; drawing a batch moves {drawn} random generator",
        cause="the dataset or the collator draws random numbers (augmentation, masking), and the Trainer restores the "
        "generators only after it has drawn the first batches of the resumed run, one of them ahead",
        fix="make what is drawn a function of the example and the epoch (a generator seeded with both), or draw it in "
        "the model, whose random numbers are restored",
        evidence={"is_cause": True},
    )
