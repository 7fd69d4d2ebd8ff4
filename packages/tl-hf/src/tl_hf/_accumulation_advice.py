"""What the accumulation check finds, with the remedies of a Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import Trainer

from tl_core import Finding
from tl_hf._words import in_words

if TYPE_CHECKING:
    from tl_accum import AccumulationReport

# By rule, what a Trainer does by itself: the remedies for a loop of one's own do not fit.
_FIXES = {
    "scheduler-steps": "leave the call of its step() out of your code: the Trainer makes it after each update",
    "zeroed-per-micro-batch": "leave the call of zero_grad() out of your code: the Trainer makes it after each update",
    "last-group-scale": "divide by self.current_gradient_accumulation_steps, the size of the group that a micro-batch "
    "belongs to, and not by args.gradient_accumulation_steps",
    "state-per-micro-batch": "update it in on_step_end(), which is called once an update, and not in on_substep_end()",
}


_STEPS = (
    "leave the calls of the optimizer's step() to the Trainer, which makes one after gradient_accumulation_steps "
    "micro-batches, and at the end of an epoch"
)
_FIXES |= dict.fromkeys(("premature-update", "missing-update", "never-updates"), _STEPS)


def advised(report: AccumulationReport, trainer: Trainer) -> AccumulationReport:
    """Return the report in the words and with the remedies of a Trainer."""
    return replace(
        report,
        findings=tuple(_advised(in_words(finding, trainer), trainer) for finding in report.findings),
        notes=tuple(in_words(note, trainer) for note in report.notes),
    )


def _advised(finding: Finding, trainer: Trainer) -> Finding:
    if finding.rule == "loss-not-divided":
        return replace(finding, cause=f"{finding.cause}{_who_divides(trainer)}", fix=_divide(trainer))
    if finding.rule == "mean-of-means":
        return replace(finding, cause=f"{finding.cause}{_who_divides(trainer)}", fix=_count(trainer))
    if finding.rule == "loss-divided-twice":
        return replace(finding, fix=_once(trainer))
    if finding.rule == "state-per-micro-batch" and finding.seen.startswith("trainer."):
        fix = "update it in on_step_end() of a callback, which is called once an update, and not in training_step()"
        return replace(finding, fix=fix)
    if finding.rule == "settings-differ" and "setup.step_index" in finding.fix:
        return replace(finding, fix="compute it from state.global_step, the number of updates")
    if finding.rule == "missing-update" and "init_scale" in finding.fix:
        return finding
    return replace(finding, fix=_FIXES.get(finding.rule, finding.fix))


def _is_left_to_the_loss(trainer: Trainer) -> bool:
    """Tell whether the Trainer takes a loss for one that is divided already."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return bool(scaled)
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def _who_divides(trainer: Trainer) -> str:
    if not _is_left_to_the_loss(trainer):
        return ""
    if getattr(trainer, "loss_is_scaled_for_ga", None):
        return "; the Trainer leaves that to the loss, since its loss_is_scaled_for_ga is True"
    if trainer.compute_loss_func is not None:
        return "; the Trainer leaves that to compute_loss_func, which is given num_items_in_batch"
    model = type(trainer.model).__name__
    return (
        f"; the Trainer leaves that to the loss where the batch has labels, since {model}.forward() takes any keyword, "
        "num_items_in_batch among them"
    )


def _count(trainer: Trainer) -> str:
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return (
            "compute the loss in a compute_loss_func: the Trainer then counts the items of the whole group and gives "
            "it num_items_in_batch, to divide the sum of the losses by (compute_loss() gets None for it, since "
            f"{type(trainer.model).__name__}.forward() takes no **kwargs)"
        )
    where = "compute_loss_func" if trainer.compute_loss_func is not None else "compute_loss()"
    return (
        f"divide the sum of the losses by num_items_in_batch, the number of items in the whole group, which {where} is "
        "given"
    )


def _divide(trainer: Trainer) -> str:
    if not _is_left_to_the_loss(trainer):
        return (
            "divide by self.current_gradient_accumulation_steps before self.accelerator.backward(loss), as the "
            "Trainer's own training_step() does"
        )
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        return (
            f"{_count(trainer)}; or set loss_is_scaled_for_ga = False in the Trainer's class for a loss that is a mean"
        )
    return f"{_count(trainer)}; or set trainer.model_accepts_loss_kwargs = False for a loss that is a mean"


def _once(trainer: Trainer) -> str:
    if _is_left_to_the_loss(trainer):
        return "divide it once: by num_items_in_batch, and by nothing else"
    return "do not divide it in compute_loss(): the Trainer divides it by the accumulation steps itself"
