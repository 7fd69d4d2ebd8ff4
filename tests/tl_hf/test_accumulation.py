"""The accumulation check on gradient_accumulation_steps: what passes, and what scales or moves wrongly, by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from transformers import Trainer, TrainerCallback

from tl_core import CheckFailed
from tl_hf import assert_hf_accumulation_equivalent, check_hf_accumulation_equivalent


class IgnoresTheCount(Trainer):
    """Hands num_items_in_batch on to nobody."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class SaysItIsAMean(IgnoresTheCount):
    loss_is_scaled_for_ga = False


class DividesTwice(Trainer):
    """Divides what the model has divided by the items of the group."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps


class ForgetsToScale(Trainer):
    """A training_step of its own, for a model whose loss is a mean, that forgets the accumulation steps."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = model(**inputs)["loss"]
        self.accelerator.backward(loss)
        return loss.detach()


class Scales(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = model(**inputs)["loss"] / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class StepsPerMicroBatch(TrainerCallback):
    def on_substep_end(self, args, state, control, lr_scheduler=None, **kwargs):
        if state.global_step:  # before the first update, torch warns of it
            lr_scheduler.step()


class ClearsPerMicroBatch(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        model.zero_grad()


class AveragesPerMicroBatch(TrainerCallback):
    def __init__(self) -> None:
        self.average: torch.Tensor | None = None

    def average_in(self, model: Any) -> None:
        now = model.lm_head.weight.detach()
        self.average = now.clone() if self.average is None else self.average.lerp(now, 0.1)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.average_in(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.average_in(model)


class AveragesPerUpdate(AveragesPerMicroBatch):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


class Remembers(TrainerCallback):
    def __init__(self) -> None:
        self.calls = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.calls += 1


class Plain(torch.nn.Module):
    """A model that takes no further keywords: the Trainer divides its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, inputs, labels=None):
        outputs = self.net(inputs)
        loss = {} if labels is None else {"loss": torch.nn.functional.mse_loss(outputs, labels)}
        return {**loss, "logits": outputs}


def plain_data() -> dict[str, torch.Tensor]:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return {"inputs": inputs, "labels": inputs.sum(1, keepdim=True)}


def check(hf: Any, model: Any = None, data: Any = None, *, face: Any = None, **arguments: Any) -> Any:
    options = {name: arguments.pop(name) for name in ("epoch_length", "cycles", "allow") if name in arguments}
    data = hf.tokens() if data is None else data
    callbacks = arguments.pop("callbacks", [])

    def make_trainer(k: int) -> Trainer:
        made = [make() for make in callbacks]
        return hf.trainer((model or hf.llama)(), data, gradient_accumulation_steps=k, callbacks=made, **arguments)

    def full(cycle: int) -> dict[str, torch.Tensor]:
        return hf.rows(data, 8 * cycle, 8 * cycle + 8)

    return (face or check_hf_accumulation_equivalent)(make_trainer, full, **options)


def found(report: Any) -> list[str]:
    return list(map(str, report.findings))


@pytest.mark.parametrize("epoch_length", [None, 6])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_counted_tokens_weigh_the_same(hf, model, epoch_length):
    """Models that are given num_items_in_batch pass over unequal numbers of tokens, also in an epoch's last group."""
    report = check(hf, getattr(hf, model), epoch_length=epoch_length)
    assert str(report) == "Gradient accumulation: passed"
    assert report.cycles == (2 if epoch_length is None else 3)


HEALTHY: dict[str, dict[str, Any]] = {
    "dropout": {"model": lambda hf: lambda: hf.llama(0.3)},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "num_train_epochs": 3},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "average": {"callbacks": [AveragesPerUpdate]},
    "bfloat16": {"bf16": True},
    "a mean that is told": {
        "trainer_class": SaysItIsAMean,
        "model": lambda hf: hf.bert,
        "data": lambda hf: hf.classes(),
    },
    "a plain model": {"model": lambda hf: Plain, "data": lambda hf: plain_data()},
    "a step of its own": {"model": lambda hf: Plain, "data": lambda hf: plain_data(), "trainer_class": Scales},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_trainer_does_right_passes(hf, name):
    """Schedules, dropout, averages once an update, losses that the Trainer divides."""
    given = {key: value(hf) if key in ("model", "data") else value for key, value in HEALTHY[name].items()}
    report = check(hf, given.pop("model", None), given.pop("data", None), epoch_length=6, **given)
    assert report.findings == ()
    assert report.ok


BY_LOSS = (
    "; the Trainer leaves that to the loss where the batch has labels, since {}.forward() takes any keyword, "
    "num_items_in_batch among them\n"
)
COUNT = (
    "  fix: divide the sum of the losses by num_items_in_batch, the number of items in the whole group, which {} is "
    "given"
)
MEAN = "; or set loss_is_scaled_for_ga = False in the Trainer's class for a loss that is a mean"
UNDIVIDED = "  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps"


def test_a_loss_that_ignores_the_count(hf):
    """A subclass that does not hand num_items_in_batch on: means of tokens, divided by nothing."""
    with pytest.raises(CheckFailed) as caught:
        check(hf, trainer_class=IgnoresTheCount, face=assert_hf_accumulation_equivalent)
    assert found(caught.value) == [
        "[mean-of-means] cycle 1 of 2: each micro-batch weighs 1 in the accumulated gradients, and by its share in the "
        "full "
        "batch's: 5, 9, 5, 9 of 28 (batch['labels'][:, 1:] != -100); norm 4.75 instead of 1.16\n"
        "  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and "
        "these "
        "means are added up: what is in micro-batches with few of them weighs too much; nor are these means divided by "
        "the "
        f"4 accumulation steps{BY_LOSS.format('LlamaForCausalLM')}{COUNT.format('compute_loss()')}"
    ]


def test_means_of_tokens_that_are_divided(hf):
    """Told that its loss is a mean, the Trainer divides it, and few tokens still weigh too much."""
    assert found(check(hf, trainer_class=SaysItIsAMean)) == [
        "[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in "
        "the "
        "full batch's: 5, 9, 5, 9 of 28 (batch['labels'][:, 1:] != -100); norm 1.19 instead of 1.16\n"
        "  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and "
        "these "
        "means are averaged: what is in micro-batches with few of them weighs too much\n"
        f"{COUNT.format('compute_loss()')}"
    ]


def test_a_model_of_transformers_whose_loss_ignores_the_count(hf):
    """BertForSequenceClassification takes num_items_in_batch, and its loss is a mean: nobody divides."""
    assert found(check(hf, hf.bert, hf.classes())) == [
        "[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 0.274 instead of "
        "0.0686)\n"
        f"{UNDIVIDED}{BY_LOSS.format('BertForSequenceClassification')}{COUNT.format('compute_loss()')}{MEAN}"
    ]


def test_a_loss_function_that_ignores_the_count(hf):
    """compute_loss_func is given the count, and the Trainer divides by nothing."""

    def mean(outputs, labels, num_items_in_batch=None):
        return (outputs["logits"] - labels).square().mean()

    told = check(hf, Plain, plain_data(), compute_loss_func=mean, max_grad_norm=0.0).findings
    assert [(f.rule, f.cause, f.fix) for f in told] == [
        (
            "loss-not-divided",
            f"{UNDIVIDED.partition(': ')[2]}; the Trainer leaves that to compute_loss_func, which is given "
            "num_items_in_batch",
            f"{COUNT.format('compute_loss_func').partition(': ')[2]}{MEAN}",
        )
    ]


def test_a_step_that_forgets_to_scale(hf):
    """A training_step of the person's own has to do what the Trainer's does."""
    assert found(check(hf, Plain, plain_data(), trainer_class=ForgetsToScale, max_grad_norm=0.0)) == [
        "[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 16.4 instead of "
        "4.11)\n"
        f"{UNDIVIDED}\n"
        "  fix: divide by self.current_gradient_accumulation_steps before self.accelerator.backward(loss), as the "
        "Trainer's "
        "own training_step() does"
    ]


def test_a_loss_that_is_divided_twice(hf):
    """By the loss and by the items, or by the loss and by the Trainer."""
    head = "[loss-divided-twice] cycle 1 of 2: the accumulated gradients are 0.25x the full batch's (norm "
    cause = "  cause: the loss is divided by the 4 accumulation steps twice\n  fix: "
    assert found(check(hf, trainer_class=DividesTwice)) == [
        f"{head}0.29 instead of 1.16)\n{cause}divide it once: by num_items_in_batch, and by nothing else"
    ]
    assert found(check(hf, Plain, plain_data(), trainer_class=DividesTwice, max_grad_norm=0.0)) == [
        f"{head}1.03 instead of 4.11)\n{cause}do not divide it in compute_loss(): the Trainer divides it by the "
        "accumulation steps itself"
    ]


def test_what_a_callback_does_in_every_micro_batch(hf):
    """Schedules that run too fast, gradients that are cleared, averages that move too often."""
    assert found(check(hf, callbacks=[StepsPerMicroBatch])) == [
        "[scheduler-steps] scheduler 'scheduler' (LambdaLR) stepped 4 times in cycle 2 of 2, in micro-batches 1, 2, 3 "
        "and 4 "
        "of 4; with the full batch, it stepped once\n"
        "  cause: scheduler.step() is called in every micro-batch: the schedule runs 4 times too fast\n"
        "  fix: leave the call of its step() out of your code: the Trainer makes it after each update"
    ]
    assert found(check(hf, callbacks=[ClearsPerMicroBatch])) == [
        "[zeroed-per-micro-batch] cycle 1 of 2: only the last of 4 micro-batches reaches the optimizer: with a norm of "
        "0.742, where all of them added 1.16 together\n"
        "  cause: the gradients are cleared (by zero_grad(), or by hand) after micro-batches 1, 2 and 3 of 4, before "
        "all of "
        "them were added up\n"
        "  fix: leave the call of zero_grad() out of your code: the Trainer makes it after each update"
    ]
    assert found(check(hf, callbacks=[AveragesPerMicroBatch])) == [
        "[state-per-micro-batch] callback AveragesPerMicroBatch moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 2 "
        "of 2; "
        "with the full batch, it moved once; average moved by -0.00396 instead of -0.000864\n"
        "  cause: it is updated in every micro-batch instead of after each update\n"
        "  fix: update it in on_step_end(), which is called once an update, and not in on_substep_end()"
    ]


def test_a_counter_of_micro_batches_is_left_alone(hf):
    """Nothing depends on it."""
    assert check(hf, callbacks=[Remembers]).ok


def test_the_trainers_own_batches_are_taken(hf):
    """Without data, the batches of make_trainer(1) are split; an incomplete last group of their epoch is compared."""

    def make_trainer(k: int) -> Trainer:
        return hf.trainer(data=hf.tokens(44), per_device_train_batch_size=4, gradient_accumulation_steps=k)

    loaders = GradientState().dataloader_references
    report = check_hf_accumulation_equivalent(make_trainer, accumulation_steps=2)
    assert GradientState().dataloader_references == loaders  # theirs is left in the middle, and does not count as used
    assert (str(report), report.cycles) == ("Gradient accumulation: passed", 7)
    assert report.data_form == "an iterable (DataLoaderShard), iterated again when it ends"


def test_a_finding_may_be_allowed(hf):
    """By its rule's id; what was not judged for that reason is told."""
    report = check(hf, trainer_class=IgnoresTheCount, allow=["mean-of-means"])
    assert report.findings == ()


def error_of(make_trainer: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError, ImportError)) as caught:
        check_hf_accumulation_equivalent(make_trainer, *arguments, **options)
    return "\n".join([f"{caught.type.__name__}: {caught.value}", *getattr(caught.value, "__notes__", ())])


def test_misuse_is_named(hf):
    """A Trainer for another number of steps, a training that is too short, batches that are too small, ..."""
    data = hf.rows(hf.tokens(), 0, 8)
    assert error_of(lambda k: hf.trainer(), data) == (
        "ValueError: make_trainer(4) must return a Trainer with gradient_accumulation_steps=4, got one with 1: hand "
        "the "
        "number on to TrainingArguments\nraised in make_setup()"
    )
    assert error_of(lambda k: hf.trainer(gradient_accumulation_steps=k, max_steps=1), data) == (
        "ValueError: the training ended after 1 updates, before all cycles were fed: raise max_steps or "
        "num_train_epochs of "
        "make_trainer(k)'s Trainer\nraised in cycle 2 (step_index 1)\nraised in the run over full batches"
    )
    assert error_of(lambda: hf.trainer(), data) == (
        "TypeError: make_trainer is called as make_trainer(k), got <lambda>()"
    )
    assert error_of(lambda k: None, data) == (
        "TypeError: make_trainer(1) must return a transformers.Trainer, got a NoneType"
    )
    assert error_of(lambda k: hf.trainer(gradient_accumulation_steps=k), data, accumulation_steps=1) == (
        "ValueError: accumulation_steps must be at least 2, got 1"
    )


def test_without_tl_accum_the_error_says_what_to_install(hf, monkeypatch):
    """The check is an extra."""
    monkeypatch.setitem(sys.modules, "tl_accum", None)
    assert error_of(lambda k: hf.trainer()) == ('ImportError: this check needs tl-accum: pip install "tl-hf[accum]"')


def test_errors_pass_through_with_their_place(hf):
    """What the person's code raises comes out as it is, with the micro-batch."""

    class Breaks(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.args.gradient_accumulation_steps > 1 and self.state.global_step:
                raise ZeroDivisionError("broken")
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ZeroDivisionError, match="broken") as caught:
        check(hf, trainer_class=Breaks)
    assert caught.value.__notes__ == [
        "raised in cycle 2, micro-batch 1 of 4 (step_index 4)",
        "raised in the run over micro-batches",
    ]
