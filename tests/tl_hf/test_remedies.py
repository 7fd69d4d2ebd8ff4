"""What a check advises is what can be done with a Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from tl_hf import check_hf_accumulation_equivalent, check_hf_resume_equivalent, watch_hf


class Plain(nn.Module):
    """Classifies vectors; its forward() takes no further keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, inputs, labels=None):
        return {"logits": self.layer(inputs)}


DATA = {"inputs": torch.arange(72.0).reshape(24, 3).sin(), "labels": torch.arange(24) % 4}


class ClassWeights(Trainer):
    """A weighted mean: the mean of the micro-batches' is not the group's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        weight = torch.tensor([1.0, 2.0, 4.0, 8.0])
        return nn.functional.cross_entropy(model(inputs["inputs"])["logits"], inputs["labels"], weight)


class Steps(Trainer):
    """Steps by itself in every micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.optimizer.optimizer.step()
        return loss


def accumulated(hf: Any, model: Any, data: Any, trainer_class: type[Trainer], **arguments: Any) -> Any:
    return check_hf_accumulation_equivalent(
        lambda k: hf.trainer(model(), data, trainer_class=trainer_class, gradient_accumulation_steps=k), **arguments
    )


def test_a_weighted_mean_where_nobody_counts(hf):
    """Without **kwargs in forward() the Trainer counts nothing: compute_loss() is given None."""
    [finding] = accumulated(hf, Plain, DATA, ClassWeights).findings
    assert (finding.rule, finding.fix) == (
        "mean-of-means",
        "compute the loss in a compute_loss_func: the Trainer then counts the items of the whole group and gives it "
        "num_items_in_batch, to divide the sum of the losses by (compute_loss() gets None for it, since "
        "Plain.forward() takes no **kwargs)",
    )


def test_updates_of_ones_own(hf):
    """The Trainer makes them."""
    finding = accumulated(hf, hf.llama, None, Steps).findings[0]
    assert (finding.rule, finding.fix) == (
        "premature-update",
        "leave the calls of the optimizer's step() to the Trainer, which makes one after gradient_accumulation_steps "
        "micro-batches, and at the end of an epoch",
    )
    assert "make_step" not in str(finding)


class Freezes(TrainerCallback):
    """Freezes a layer at the second update, once."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.lm_head.weight.requires_grad_(False)


def test_a_layer_that_a_callback_froze(hf):
    """A resumed Trainer begins with a model as it is built; a callback can freeze it again."""
    [finding] = check_hf_resume_equivalent(lambda: hf.trainer(callbacks=[Freezes()])).findings
    assert (finding.rule, finding.fix) == (
        "trainable-not-restored",
        "freeze and unfreeze in on_train_begin() of a callback as the run had done, for example from the restored step",
    )


def test_an_order_from_the_global_generator(hf):
    """It is another one when the epoch is begun again: how many batches were drawn is not what is missing."""

    class Shuffles(torch.utils.data.IterableDataset):
        def __iter__(self):
            ids = hf.tokens(12)["input_ids"]
            for row in torch.randperm(len(ids)).tolist():
                yield {"input_ids": ids[row], "labels": ids[row]}

    findings = check_hf_resume_equivalent(lambda: hf.trainer(hf.llama(0.2), Shuffles())).findings
    assert findings
    assert [finding.fix for finding in findings if "the epoch" not in finding.fix] == []


class Average(TrainerCallback):
    """An average of the weights that stays what it was at first."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_watch_names_callbacks_too(hf):
    """As the other checks do; the person has written no setup."""
    trainer = hf.trainer(callbacks=[Average()])
    with watch_hf(trainer) as run:
        trainer.train()
    told = [str(finding) for finding in (*run.findings, *run.notes)]
    assert [text for text in told if "callback Average.average" in text]
    assert [text for text in told if "setup." in text] == []
