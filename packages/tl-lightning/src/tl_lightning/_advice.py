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
    (r"\bmake_setup\(\)", "make_fit()"),
    (r"\bload\(\)", "fit(ckpt_path=...)"),
    (r"\bsave\(\)", "save_checkpoint()"),
    (r"\bsetup\.model\b", "module"),
    (r"\bin the setup\b", "outside of the module's buffers"),
)

RESUME = {
    "rng-not-restored": "Lightning's checkpoints hold no random state: draw what a step draws from its number, with "
    "torch.manual_seed(seed + trainer.global_step) in on_train_batch_start(), or keep the generators' states in a "
    "callback's state_dict()",
    "data-position-not-restored": "give the loader an order that a new process finds again (a sampler with "
    "set_epoch(), which Lightning calls), and a position: torchdata's StatefulDataLoader has one, any other loader can "
    "only be resumed at the end of an epoch",
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
}


def advised(report: R, fixes: Mapping[str, str], skipped_steps: Iterable[str] = ()) -> R:
    """Return a report with fixes that can be made around a Trainer.

    Args:
        report: the report.
        fixes: by rule, what to change.
        skipped_steps: the schedulers whose step, due after the checkpoint, the resumed fit did not make.
    """
    findings = [replace(one, fix=fixes.get(one.rule, one.fix)) for one in report.findings]
    if names := ", ".join(map(repr, sorted(skipped_steps))):
        findings = [
            replace(
                one,
                cause=f"Lightning saves at the end of an epoch before it steps {names} (ReduceLROnPlateau), and a "
                "resumed fit does not make up for that step",
                fix="step it in on_train_epoch_end() or on_validation_epoch_end() of the module, which come before the "
                "checkpoint, instead of returning it from configure_optimizers()",
            )
            if one.rule == "resume-diverges"
            else one
            for one in findings
        ]
    return replace(report, findings=tuple(findings))


def in_words(report: R, callbacks: Iterable[str]) -> R:
    """Return a report in the words of the person, who has written neither a setup nor a load().

    Args:
        report: the report.
        callbacks: the names of the person's callbacks in the setup.
    """
    words = [*_WORDS, *((rf"\bsetup\.{re.escape(name)}(?!\w)", f"callback {name}") for name in callbacks)]

    def told(text: str) -> str:
        for pattern, word in words:
            text = re.sub(pattern, word, text)
        return text

    def rewritten(finding: Finding) -> Finding:
        return replace(finding, seen=told(finding.seen), cause=told(finding.cause), fix=told(finding.fix))

    return replace(report, findings=tuple(map(rewritten, report.findings)), notes=tuple(map(rewritten, report.notes)))
