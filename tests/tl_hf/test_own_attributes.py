"""What a Trainer of the person's own class keeps beside the model: criteria with weights, averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer

from tl_hf import check_hf_accumulation_equivalent, watch_hf


class Penalised(Trainer):
    """Adds a penalty that has weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.centers = nn.Linear(32, 4)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.1 * self.share() * self.centers(outputs.logits).square().mean()
        return (loss, outputs) if return_outputs else loss

    def share(self):
        return 1 / self.current_gradient_accumulation_steps


class NeverCleared(Penalised):
    """Has it in the optimizer; but a Trainer clears the gradients of its model, not those of its optimizer."""

    def create_optimizer(self, model=None):
        super().create_optimizer()
        self.optimizer.add_param_group({"params": list(self.centers.parameters())})
        return self.optimizer


class PenalisedInOptimizer(NeverCleared):
    def create_optimizer(self, model=None):
        super().create_optimizer()
        self.optimizer.register_step_post_hook(lambda *given: self.centers.zero_grad())
        return self.optimizer


class Teaches(Trainer):
    """Keeps a frozen copy and one that no gradient reaches, and a history."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.before = copy.deepcopy(self.model)
        self.history: list[float] = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            self.teacher(**inputs)
            self.before(**inputs)
        self.history.append(float(loss.detach()))
        return (loss, outputs) if return_outputs else loss


def watched(trainer: Trainer) -> Any:
    with watch_hf(trainer) as run:
        trainer.train()
    return run


def test_a_criterion_in_no_optimizer(hf):
    """A Trainer builds its optimizer from the model alone: what stands beside that is trained by nothing."""
    findings = watched(hf.trainer(trainer_class=Penalised)).findings
    assert list(map(str, findings)) == [
        "[uncovered-parameter] trainer.* (2 tensors) got gradients from 8 backward passes, without being in an "
        "optimizer, and nothing moved them. trainer.centers (Linear) is beside the model, and has weights of its own\n"
        "  cause: the optimizer was built from the model's parameters, to which a criterion's do not belong\n"
        "  fix: build it from both ([*model.parameters(), *trainer.centers.parameters()]); if they are not meant to "
        "train, freeze them with requires_grad_(False), which also saves their gradients"
    ]


class Undivided(PenalisedInOptimizer):
    def share(self):
        return 1.0


def test_a_penalty_that_nobody_divides(hf):
    """The loss of tokens is divided by num_items_in_batch; examples without any token that counts break no probe."""
    report = check_hf_accumulation_equivalent(
        lambda k: hf.trainer(trainer_class=Undivided, gradient_accumulation_steps=k)
    )
    assert [finding.rule for finding in report.findings] == ["loss-not-divided"]


def test_a_criterion_whose_gradients_nobody_clears(hf):
    """They add up from update to update."""
    [finding] = watched(hf.trainer(trainer_class=NeverCleared)).findings
    assert finding.rule == "missing-zero-grad"
    assert finding.seen.startswith("the gradients of trainer.* (2 tensors) that 'optimizer' stepped with still held ")


@pytest.mark.parametrize("trainer_class", [PenalisedInOptimizer, Teaches])
def test_what_is_meant_so_is_left_alone(hf, trainer_class):
    """A criterion that is in the optimizer, teachers that are not to train."""
    assert watched(hf.trainer(trainer_class=trainer_class)).findings == ()
    report = check_hf_accumulation_equivalent(
        lambda k: hf.trainer(trainer_class=trainer_class, gradient_accumulation_steps=k)
    )
    assert report.ok, str(report)


class Follows(Trainer):
    """An average of the weights that training_step moves: in every micro-batch."""

    def make(self) -> Any:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def moves(self) -> bool:
        return True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "ema"):
            self.ema = self.make()
        loss = super().training_step(*args, **kwargs)
        if self.moves():
            self.move()
        return loss

    def move(self) -> None:
        self.ema.update_parameters(self.model)


class FollowsInDict(Follows):
    def make(self):
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def move(self):
        for name, tensor in self.model.named_parameters():
            self.ema[name] = self.ema[name].lerp(tensor.detach(), 0.1)


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


class FollowsInObject(Follows):
    def make(self):
        return Average(self.model)

    def move(self):
        for name, tensor in self.model.named_parameters():
            self.ema.weights[name].lerp_(tensor.detach(), 0.1)


@pytest.mark.parametrize("trainer_class", [Follows, FollowsInDict, FollowsInObject])
def test_an_average_that_moves_in_every_micro_batch(hf, trainer_class):
    """Whatever it is kept in, and although it is there only when training has begun."""
    [finding] = check_hf_accumulation_equivalent(
        lambda k: hf.trainer(trainer_class=trainer_class, gradient_accumulation_steps=k)
    ).findings
    assert (finding.rule, finding.cause, finding.fix) == (
        "state-per-micro-batch",
        "it is updated in every micro-batch instead of after each update",
        "update it in on_step_end() of a callback, which is called once an update, and not in training_step()",
    )
    assert finding.seen.startswith("trainer.ema moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 2 of 4; with the ")


@pytest.mark.parametrize("trainer_class", [Follows, FollowsInDict, FollowsInObject])
def test_an_average_that_moves_once_an_update(hf, trainer_class):
    """The near miss: in the last micro-batch of each group."""

    class Waits(trainer_class):
        def moves(self):
            return self.accelerator.sync_gradients

    report = check_hf_accumulation_equivalent(lambda k: hf.trainer(trainer_class=Waits, gradient_accumulation_steps=k))
    assert str(report) == "Gradient accumulation: passed"
