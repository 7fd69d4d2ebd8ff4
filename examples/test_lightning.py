"""The tests that the module in ``lightning_loop.py`` has, as they would stand in its own project.

Try: break one line of it and see what ``hatch run test examples -k lightning`` says.

- leave the head out of the optimizer
- decay the biases too
- detach the features
- make the loss anew from its number
- clear the gradients in a hook
- step the scheduler in the module as well
- count the warmup in epochs
- sum the loss over the batch
- average in every micro-batch
- forget the average in checkpoints
- draw dropout from a generator that no checkpoint holds
- shuffle as the loaders of torch do
- use a loader that does not know its place
- use a sampler that knows the epoch only
"""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning_loop
import pytest
import torch
from one_line_bugs import Bug, with_bug
from torch import nn

from tl_core import CheckFailed

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 with torch 2.13
]
WARMUP_UPDATES = 5


def batches(loop):
    dataset, _ = loop.load_data()
    return list(zip(*(tensor.split(loop.BATCH_SIZE) for tensor in dataset.tensors), strict=True))


def check_run(run):
    run.assert_healthy(max_grad_norm=10.0)
    run.assert_lr(lambda step: 5e-3 * min(1.0, (step + 1) / WARMUP_UPDATES))
    run.assert_loss_decreases(0.3)


def check_optimizer(loop, training_runner, lightning_trainer):
    module = loop.LitDigits()
    optimizer = module.configure_optimizers()["optimizer"]
    training_runner.assert_optimizer_coverage(module, optimizer, no_decay=["*.bias", "body.1.*"])


def check_updates(loop, training_runner, lightning_trainer):
    """Hand the module to a check that feeds it batch by batch, through a real Trainer."""
    make_setup, step = training_runner.from_lightning(loop.LitDigits, trainer_kwargs=loop.trainer_arguments())
    check_run(training_runner.run(make_setup, batches(loop), step, steps=20))


def check_accumulation(loop, training_runner, lightning_trainer):
    return training_runner.assert_lightning_accumulation_equivalent(
        loop.LitDigits, batches(loop), trainer_kwargs=loop.trainer_arguments()
    )


def check_resume(loop, training_runner, lightning_trainer, resume_at=13):
    def make_fit():
        trainer = lightning_trainer(**loop.trainer_arguments())
        return trainer, loop.LitDigits(), loop.training_loader(), loop.validation_loader()

    return training_runner.assert_lightning_resume_equivalent(make_fit, steps=resume_at + 3, resume_at=resume_at)


def test_the_optimizer_decays_weights_only(training_runner, lightning_trainer):
    """The optimizer that the module configures holds every parameter once, and decays no bias and no norm."""
    check_optimizer(lightning_loop, training_runner, lightning_trainer)


def test_each_batch_makes_the_update_that_is_meant(training_runner, lightning_trainer):
    """No rule finds anything, the warmup is the one that is meant, and the loss falls."""
    check_updates(lightning_loop, training_runner, lightning_trainer)


def test_a_real_fit_is_healthy_and_learns(training_runner, lightning_trainer):
    """A fit with validation: no findings, and nine of ten digits that training never saw are read rightly."""
    trainer = lightning_trainer(**lightning_loop.trainer_arguments())
    with training_runner.watch_lightning(trainer) as run:
        trainer.fit(lightning_loop.LitDigits(), lightning_loop.training_loader(), lightning_loop.validation_loader())
    check_run(run)
    run.assert_num_updates(44)
    assert trainer.callback_metrics["accuracy"] > 0.9


def test_accumulation_makes_the_updates_of_the_full_batch(training_runner, lightning_trainer):
    """Accumulated, four micro-batches make the update of their batch, and count once in the average."""
    report = check_accumulation(lightning_loop, training_runner, lightning_trainer)
    assert report.notes == ()


@pytest.mark.parametrize("resume_at", [5, 11, 13], ids=["in the first epoch", "between two epochs", "in the second"])
def test_a_resumed_fit_is_the_uninterrupted_one(resume_at, training_runner, lightning_trainer):
    """What fit(ckpt_path=...) goes on with is the run that was saved: the data, dropout and the average too."""
    report = check_resume(lightning_loop, training_runner, lightning_trainer, resume_at)
    assert report.continuous[resume_at:] == report.resumed


def test_the_average_counts_updates(lightning_trainer):
    """With accumulation, the callback has seen every update once, and holds an average of each parameter."""
    callback = lightning_loop.WeightAverage()
    trainer = lightning_trainer(max_steps=6, accumulate_grad_batches=2, callbacks=[callback])
    module = lightning_loop.LitDigits()
    trainer.fit(module, lightning_loop.training_loader(), lightning_loop.validation_loader())
    state = callback.state_dict()
    assert state["updates"] == 6
    assert state["average"].keys() == dict(module.named_parameters()).keys()
    average, weights = (nn.utils.parameters_to_vector(v) for v in (state["average"].values(), module.parameters()))
    assert 0 < torch.dist(average, weights) < 0.1 * weights.norm()


# The rest tests the checks: every bug of the list above gets its finding.

LOSS = "        loss = functional.cross_entropy(self(images), digits)"
SEED = "        torch.manual_seed(100_000 * self.current_epoch + batch_index)  # a checkpoint holds no generator"
SCHEDULER = '        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}'
LOADER = "    return StatefulDataLoader(dataset, BATCH_SIZE, sampler=sampler)"
BUGS = {
    check_optimizer: (
        Bug(
            "leave the head out of the optimizer",
            "uncovered-parameter",
            "        trained = list(self.parameters())",
            "        trained = list(self.body.parameters())",
        ),
        Bug(
            "decay the biases too",
            "decayed-parameter",
            '            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},',
            '            {"params": [p for p in trained if p.ndim < 2]},',
        ),
    ),
    check_updates: (
        Bug(
            "detach the features",
            "no-gradient",
            "        features = self.body(images)",
            "        features = self.body(images).detach()",
        ),
        Bug(
            "make the loss anew from its number",
            "loss-not-connected",
            LOSS,
            f"{LOSS}; loss = torch.tensor(loss.item(), requires_grad=True)",
        ),
        Bug(
            "clear the gradients in a hook",
            "zeroed-before-step",
            SEED,
            f"{SEED}\n\n    def on_before_optimizer_step(self, optimizer): optimizer.zero_grad()",
        ),
        Bug(
            "step the scheduler in the module as well",
            "scheduler-stepped-twice",
            LOSS,
            f"{LOSS}; self.lr_schedulers().step()",
        ),
        Bug(
            "count the warmup in epochs",
            "lr-unexpected",
            SCHEDULER,
            SCHEDULER.replace('"step"', '"epoch"'),
        ),
        Bug(
            "sum the loss over the batch",
            "grad-norm-exceeded",
            LOSS,
            '        loss = functional.cross_entropy(self(images), digits, reduction="sum")',
        ),
    ),
    check_accumulation: (
        Bug(
            "average in every micro-batch",
            "state-per-micro-batch",
            "        if trainer.global_step == self.updates:",
            "        if trainer.global_step < self.updates:",
        ),
    ),
    check_resume: (
        Bug(
            "forget the average in checkpoints",
            "attribute-not-restored",
            '        return {"updates": self.updates, "average": self.average}',
            "        return {}",
        ),
        Bug(
            "draw dropout from a generator that no checkpoint holds",
            "rng-not-restored",
            SEED,
            "        pass",
        ),
        Bug(
            "shuffle as the loaders of torch do",
            "data-position-not-restored",
            LOADER,
            "    return DataLoader(dataset, BATCH_SIZE, shuffle=True)",
        ),
        Bug(
            "use a loader that does not know its place",
            "data-position-not-restored",
            LOADER,
            "    return DataLoader(dataset, BATCH_SIZE, sampler=sampler)",
        ),
        Bug(
            "use a sampler that knows the epoch only",
            "data-position-not-restored",
            "    sampler = EpochOrder(len(dataset))",
            "    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)",
        ),
    ),
}


@pytest.mark.parametrize(
    ("check", "bug"), [pytest.param(check, bug, id=bug.title) for check, bugs in BUGS.items() for bug in bugs]
)
def test_each_bug_gets_its_finding_first(check, bug, lightning_trainer, training_runner):
    """The first finding names the bug."""
    loop = with_bug(bug, Path(lightning_loop.__file__))
    with warnings.catch_warnings(record=True):  # torch and Lightning warn of some of these bugs too
        warnings.simplefilter("always")
        with pytest.raises(CheckFailed) as caught:
            check(loop, training_runner, lightning_trainer)
    assert caught.value.findings[0].rule == bug.rule


def test_the_list_above_names_the_bugs():
    """What this file says to try is what is tried."""
    assert [line.removeprefix("- ") for line in __doc__.splitlines() if line.startswith("- ")] == [
        bug.title for bugs in BUGS.values() for bug in bugs
    ]
