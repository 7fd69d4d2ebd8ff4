"""The tests that the training in ``hf_trainer_loop.py`` has, as they would stand in its own project.

Try: break one line of it and see what ``hatch run test examples -k hf_trainer`` says.

- leave the head out of the optimizer
- decay the biases too
- build the optimizer for another copy of the model
- make the loss anew from its number
- forget the warmup
- step the scheduler in compute_loss as well
- train with a learning rate of 0
- divide by the size of the micro-batch
- divide by the words of the micro-batch
- clear the gradients in every micro-batch
- save the weights only
- drop words at random
- forget the class weights
"""

from __future__ import annotations

import warnings
from pathlib import Path

import hf_trainer_loop
import pytest
import torch
from one_line_bugs import Bug, with_bug

from tl_core import CheckFailed

NUM_SENTENCES = 512
NUM_UPDATES = 2 * NUM_SENTENCES // hf_trainer_loop.BATCH_SIZE


@pytest.fixture
def make_trainer(hf_trainer):
    def make(loop=hf_trainer_loop, accumulation_steps=1):
        return hf_trainer(
            loop.make_model(),
            loop.make_data(NUM_SENTENCES, seed=0),
            loop.make_data(128, seed=1),
            trainer_class=loop.NameTrainer,
            data_collator=loop.collate,
            compute_metrics=loop.compute_metrics,
            per_device_train_batch_size=loop.BATCH_SIZE // accumulation_steps,
            gradient_accumulation_steps=accumulation_steps,
            **loop.ARGUMENTS,
        )

    return make


def check_optimizer(loop, training_runner, make_trainer):
    training_runner.assert_hf_optimizer_coverage(make_trainer(loop))


def check_training(loop, training_runner, make_trainer):
    trainer = make_trainer(loop)
    with training_runner.watch_hf(trainer) as run:
        trainer.train()
    run.assert_healthy()
    run.assert_num_updates(NUM_UPDATES)
    run.assert_lr(lambda step: 3e-3 * min(1.0, step / 5))
    run.assert_loss_decreases(0.3)
    return trainer


def check_accumulation(loop, training_runner, make_trainer):
    training_runner.assert_hf_accumulation_equivalent(lambda k: make_trainer(loop, k), accumulation_steps=2)


def check_resume(loop, training_runner, make_trainer):
    training_runner.assert_hf_resume_equivalent(lambda: make_trainer(loop), steps=4)


def check_class_weights(loop, training_runner, make_trainer):
    trainer = make_trainer(loop)
    model, batch = trainer.model.eval(), next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(model, dict(batch))
    chances = model(batch["input_ids"], batch["attention_mask"]).logits.softmax(dim=-1)
    names, others = (-chances[..., tag][batch["labels"] == tag].log() for tag in (1, 0))
    expected = (4 * names.sum() + others.sum()) / (len(names) + len(others))
    torch.testing.assert_close(loss, expected)


def test_weight_decay_reaches_each_weight_once(training_runner, make_trainer):
    """Every parameter is in one group of the optimizer, and biases and norms are in one without decay."""
    check_optimizer(hf_trainer_loop, training_runner, make_trainer)


def test_the_training_is_healthy_and_learns(training_runner, make_trainer):
    """No rule finds anything, the warmup is the one that is meant, the loss falls, and most names are found."""
    trainer = check_training(hf_trainer_loop, training_runner, make_trainer)
    metrics = trainer.evaluate()
    assert 0.9 < metrics["eval_recall"] <= 1.0
    assert 0.9 < metrics["eval_accuracy"] <= 1.0
    assert metrics["eval_loss"] < 0.3


def test_names_weigh_more(training_runner, make_trainer):
    """The loss is the mean over the words that are no padding, in which a name counts four times."""
    check_class_weights(hf_trainer_loop, training_runner, make_trainer)


def test_accumulation_makes_the_updates_of_the_large_batch(training_runner, make_trainer):
    """Although micro-batches differ in how many words they have, two of them make the update of their batch."""
    check_accumulation(hf_trainer_loop, training_runner, make_trainer)


def test_a_resumed_training_is_the_uninterrupted_one(training_runner, make_trainer):
    """What train(resume_from_checkpoint=...) goes on with is the training that was saved, with its data and dropout."""
    check_resume(hf_trainer_loop, training_runner, make_trainer)


# The rest tests the checks: every bug of the list above gets its finding.

NAMED = "        named = list(self.model.named_parameters())"
UNDECAYED = '            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},'
LOSS = "        loss = summed / count"
BATCH = "    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}"
WEIGHTS = Bug(
    "forget the class weights",
    "",  # only this project knows what a name weighs
    "        weights = torch.tensor(CLASS_WEIGHTS, device=outputs.logits.device)",
    "        weights = None",
)
BUGS = {
    check_optimizer: (
        Bug(
            "leave the head out of the optimizer",
            "uncovered-parameter",
            NAMED,
            "        named = list(self.model.bert.named_parameters(prefix='bert'))",
        ),
        Bug(
            "decay the biases too",
            "decayed-parameter",
            UNDECAYED,
            '            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.01},',
        ),
        Bug(
            "build the optimizer for another copy of the model",
            "other-copy",
            NAMED,
            "        named = list(make_model().named_parameters())",
        ),
    ),
    check_training: (
        Bug(
            "make the loss anew from its number",
            "loss-not-connected",
            LOSS,
            "        loss = torch.tensor(float(summed / count), requires_grad=True)",
        ),
        Bug(
            "forget the warmup",
            "lr-unexpected",
            '    "warmup_steps": WARMUP_UPDATES,',
            "",
        ),
        Bug(
            "step the scheduler in compute_loss as well",
            "scheduler-stepped-twice",
            LOSS,
            f"{LOSS}; self.lr_scheduler.step()",
        ),
        Bug(
            "train with a learning rate of 0",
            "lr-zero",
            '    "learning_rate": LEARNING_RATE,',
            '    "learning_rate": 0.0,',
        ),
    ),
    check_accumulation: (
        Bug(
            "divide by the size of the micro-batch",
            "loss-not-divided",
            LOSS,
            "        loss = summed / labels.numel()",
        ),
        Bug(
            "divide by the words of the micro-batch",
            "mean-of-means",
            LOSS,
            "        loss = summed / (labels != IGNORED).sum()",
        ),
        Bug(
            "clear the gradients in every micro-batch",
            "zeroed-per-micro-batch",
            LOSS,
            f"        model.zero_grad(); {LOSS.strip()}",
        ),
    ),
    check_resume: (
        Bug(
            "save the weights only",
            "optimizer-state-not-restored",
            '    "save_only_model": False,',
            '    "save_only_model": True,',
        ),
        Bug(
            "drop words at random",
            "rng-not-restored",
            BATCH,
            f"{BATCH}; batch['input_ids'] *= torch.rand(batch['input_ids'].shape) < 0.9",
        ),
    ),
}


@pytest.mark.parametrize(
    ("check", "bug"), [pytest.param(check, bug, id=bug.title) for check, bugs in BUGS.items() for bug in bugs]
)
def test_each_bug_gets_its_finding_first(check, bug, training_runner, make_trainer):
    """The first finding names the bug."""
    loop = with_bug(bug, Path(hf_trainer_loop.__file__))
    with warnings.catch_warnings(record=True):  # torch and transformers warn of some of these bugs too
        warnings.simplefilter("always")
        with pytest.raises(CheckFailed) as caught:
            check(loop, training_runner, make_trainer)
    assert caught.value.findings[0].rule == bug.rule


def test_forgotten_class_weights_are_caught(training_runner, make_trainer):
    """The project's own assertion says that the loss is another one."""
    loop = with_bug(WEIGHTS, Path(hf_trainer_loop.__file__))
    with pytest.raises(AssertionError, match="Scalars are not close!"):
        check_class_weights(loop, training_runner, make_trainer)


def test_the_list_above_names_the_bugs():
    """What this file says to try is what is tried."""
    assert [line.removeprefix("- ") for line in __doc__.splitlines() if line.startswith("- ")] == [
        *(bug.title for bugs in BUGS.values() for bug in bugs),
        WEIGHTS.title,
    ]
