"""What the accumulation check finds, with the remedies of a Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import Trainer

from tl_core import Finding

if TYPE_CHECKING:
    from tl_accum import AccumulationReport

_COUNTED = "divide the sum of the losses by num_items_in_batch, which compute_loss() is given: the items of the group"


def advised(report: AccumulationReport, trainer: Trainer) -> AccumulationReport:
    """Return the report with what a Trainer does about the scale of a loss."""
    return replace(report, findings=tuple(_advised(finding, trainer) for finding in report.findings))


def _advised(finding: Finding, trainer: Trainer) -> Finding:
    if finding.rule == "loss-not-divided":
        return replace(finding, cause=f"{finding.cause}{_who_divides(trainer)}", fix=_divide(trainer))
    if finding.rule == "mean-of-means":
        return replace(finding, cause=f"{finding.cause}{_who_divides(trainer)}", fix=_COUNTED)
    if finding.rule == "loss-divided-twice":
        return replace(finding, fix=_once(trainer))
    return finding


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


def _divide(trainer: Trainer) -> str:
    if not _is_left_to_the_loss(trainer):
        return (
            "divide by self.current_gradient_accumulation_steps before self.accelerator.backward(loss), as the "
            "Trainer's own training_step() does"
        )
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        return f"{_COUNTED}; or set loss_is_scaled_for_ga = False in the Trainer's class for a loss that is a mean"
    return f"{_COUNTED}; or set trainer.model_accepts_loss_kwargs = False for a loss that is a mean"


def _once(trainer: Trainer) -> str:
    if _is_left_to_the_loss(trainer):
        return "divide it once: by num_items_in_batch, and by nothing else"
    return "do not divide it in compute_loss(): the Trainer divides it by the accumulation steps itself"
