"""What to change where the code that saves, loads and accumulates is Lightning's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tl_core import Finding, Report

R = TypeVar("R", bound=Report)

# The functions that the check was given are this package's: the person knows what they call.
_WORDS = (
    (r"\bload\(\)", "fit(ckpt_path=...)"),
    (r"\bsave\(\)", "save_checkpoint()"),
    (r"\bsetup\.model\b", "module"),
    (r"\bin the setup\b", "outside of the module's buffers"),
)

RESUME = {
    "rng-not-restored": "Lightning's checkpoints hold no random state: draw what a step draws from its number, with "
    "torch.manual_seed(seed + trainer.global_step) in on_train_batch_start(), and the order of the data from the "
    "epoch's number, with a sampler that has set_epoch()",
    "data-position-not-restored": "let the order follow from the epoch's number (a sampler with set_epoch(), which "
    "Lightning calls after it has begun to iterate: the order is to be made when the first index is asked for) and, "
    "within an epoch, give the loader a position: torchdata's StatefulDataLoader has one, any other can only be "
    "resumed at the end of an epoch",
    "optimizer-state-not-restored": "return the optimizer from configure_optimizers(), and leave its entry in the "
    "checkpoint as it is in on_save_checkpoint() and on_load_checkpoint()",
    "scheduler-not-restored": "return the scheduler from configure_optimizers(), and leave its entry in the checkpoint "
    "as it is in on_save_checkpoint() and on_load_checkpoint()",
    "trainable-not-restored": "set requires_grad in on_train_start(), by trainer.global_step or by what "
    "on_load_checkpoint() has read",
    "generator-not-restored": "return its state from a callback's state_dict(), or put it into the checkpoint in the "
    "module's on_save_checkpoint(), and set it again in load_state_dict() or on_load_checkpoint()",
    "outside-state-not-restored": "keep it in the module or in a callback, and save it by on_save_checkpoint() or "
    "state_dict()",
    "attribute-not-restored": "in a callback, return it from state_dict() and set it again in load_state_dict(), which "
    "Lightning calls; in the module, register a buffer, or use on_save_checkpoint() and on_load_checkpoint()",
}

# For automatic optimization.
ACCUMULATION = {
    "last-group-scale": "Lightning divides by accumulate_grad_batches in an epoch's last group too: let the epoch's "
    "length be a multiple of it (drop_last=True, limit_train_batches), or accumulate by manual optimization",
    "mean-of-means": "Lightning averages what training_step returns and cannot count ahead: let all batches have as "
    "many elements that count, or accumulate by manual optimization, with the sum divided by the whole group's count",
    "loss-divided-twice": "return the undivided loss from training_step: the Trainer divides it by "
    "accumulate_grad_batches",
    "wrong-loss-scale": "return a mean over the batch from training_step: the Trainer divides sums, too, by "
    "accumulate_grad_batches",
    "state-per-micro-batch": "update it only where trainer.global_step has grown since the last call: the hooks around "
    "a batch are called for each micro-batch",
}


def advised(report: R, fixes: Mapping[str, str]) -> R:
    """Return a report with fixes that can be made around a Trainer."""
    return replace(report, findings=tuple(replace(one, fix=fixes.get(one.rule, one.fix)) for one in report.findings))


def told_of_hooks(report: R, restoring: Iterable[str]) -> R:
    """Return a report that says what can become of the state that a callback restores.

    Args:
        report: the report.
        restoring: the names of the person's callbacks that have a ``load_state_dict`` of their own.
    """
    pieces = {f"setup.{name}" for name in restoring}
    cause = (
        "the callback has a load_state_dict(), and something else is there when training goes on: state_dict() does "
        "not return it, or on_fit_start() or on_train_start(), which Lightning calls after it has restored callbacks, "
        "makes it anew"
    )
    fix = (
        "return it from state_dict() and set it in load_state_dict(); let on_fit_start() and on_train_start() make it "
        "only where it is not there yet"
    )
    findings = tuple(
        replace(one, cause=cause, fix=fix)
        if one.rule == "attribute-not-restored" and one.evidence.get("piece") in pieces
        else one
        for one in report.findings
    )
    return replace(report, findings=findings)


def explained(report: R, lost: Iterable[str], overwritten: Iterable[str]) -> R:
    """Return a report that says what lay between the checkpoint and the next batch, where the runs part without cause.

    Args:
        report: the report.
        lost: what changed there in the run that saved, and not in the resumed one.
        overwritten: what changed there in the resumed one only.
    """
    if names := ", ".join(overwritten):
        cause = f"after Lightning has restored the checkpoint, and before the first batch, a hook changes {names}"
        fix = "let on_train_start() and on_train_epoch_start() leave it alone where trainer.global_step is not 0"
    elif names := ", ".join(lost):
        cause = (
            f"the run that saved changed {names} after the checkpoint was written and before the next batch (Lightning "
            "steps ReduceLROnPlateau, and calls the module's on_train_batch_end(), after callbacks have saved), and "
            "the resumed fit does not make up for that"
        )
        fix = "do it in a hook that comes before the checkpoint: training_step(), or on_train_epoch_end()"
    else:
        return report
    findings = tuple(
        replace(one, cause=cause, fix=fix) if one.rule == "resume-diverges" else one for one in report.findings
    )
    return replace(report, findings=findings)


def repeated(report: R, beyond_epoch: int) -> R:
    """Return a report that says why the resumed fit trained on one batch too many.

    Args:
        report: the report.
        beyond_epoch: which batch of an epoch the resumed fit trained on that has not as many; 0: none.
    """
    if not beyond_epoch:
        return report
    cause = (
        "limited by max_steps, Lightning goes on with the epoch that was over when it saved: the resumed fit "
        f"trained on batch {beyond_epoch} of an epoch that has {beyond_epoch - 1}"
    )
    fix = "limit the Trainer by max_epochs in place of max_steps"
    findings = tuple(
        replace(one, cause=f"{one.cause}; {cause}", fix=f"{fix}; if this stays: {one.fix}")
        if one.rule in ("data-position-not-restored", "resume-diverges")
        else one
        for one in report.findings
    )
    return replace(report, findings=findings)


def in_words(report: R, given: Mapping[str, str], callbacks: Iterable[str]) -> R:
    """Return a report in the words of the person, who has written neither a setup nor a load().

    Args:
        report: the report.
        given: by patterns of what the check was given, what they have written in place of it.
        callbacks: the names of the person's callbacks in the setup.
    """
    named = ((rf"\bsetup\.{re.escape(name)}(?!\w)", f"callback {name}") for name in callbacks)
    words = [*given.items(), *_WORDS, *named]

    def told(text: str) -> str:
        for pattern, word in words:
            text = re.sub(pattern, word, text)
        return text

    def rewritten(finding: Finding) -> Finding:
        return replace(finding, seen=told(finding.seen), cause=told(finding.cause), fix=told(finding.fix))

    return replace(report, findings=tuple(map(rewritten, report.findings)), notes=tuple(map(rewritten, report.notes)))
