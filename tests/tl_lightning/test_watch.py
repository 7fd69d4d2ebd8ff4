"""A real ``Trainer.fit``, watched."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tl_core import CheckFailed, NotJudged
from tl_lightning import watch_lightning

NOT_BEGUN = "nothing was observed: the training that this run waits for has not begun"
NOTHING = """\
Training run: could not judge

Notes:
[not-judged] no training began inside of the watch
  fix: look at its limits and data"""


def error_of(kind, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    return str(error.value)


def loader_of(batches):
    return DataLoader(batches, batch_size=None)


def test_a_healthy_fit_passes(pl, make_class, make_trainer, batches):
    """A correct fit passes, with one record a batch, over all epochs."""
    trainer = make_trainer(pl, max_epochs=2)
    with watch_lightning(trainer) as run:
        trainer.fit(make_class(pl)(), loader_of(batches))
    assert str(run.check()) == "Training run: passed"
    assert [record.optimizer_steps for record in run.records] == [{"optimizer": 1}] * 8
    assert run.assert_healthy() is run
    assert run.setup.model is trainer.lightning_module


def test_losses_are_what_the_module_returned(pl, make_class, make_trainer, batches):
    """Each record has the loss of its batch, undivided under accumulation, and the updates where they were made."""
    losses = []

    def training_step(self, batch, batch_idx):
        losses.append(self.loss(batch))
        return losses[-1]

    trainer = make_trainer(pl, max_epochs=2, accumulate_grad_batches=3)
    with watch_lightning(trainer) as run:
        trainer.fit(make_class(pl, training_step=training_step)(), loader_of(batches))
    assert run.losses == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [record.num_examples for record in run.records] == [8] * 8


def test_a_dict_with_the_loss_is_read(one_pl, make_class, make_trainer, batches):
    """A ``training_step`` may return a dict with its loss in it."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "other": loss.detach() * 2}

    trainer = make_trainer(one_pl, max_epochs=1)
    with watch_lightning(trainer) as run:
        trainer.fit(make_class(one_pl, training_step=training_step)(), loader_of(batches))
    assert len(run.losses) == 4
    assert str(run.check()) == "Training run: passed"


def test_validation_is_no_record(pl, make_class, make_trainer, batches):
    """Validation between the batches, and before the first, makes no records, and is no part of one."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    trainer = make_trainer(pl, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1)
    with watch_lightning(trainer) as run:
        trainer.fit(make_class(pl, validation_step=validation_step)(), loader_of(batches), loader_of(batches))
    assert [len(record.losses) for record in run.records] == [1] * 8
    assert str(run.check()) == "Training run: passed"


def test_schedulers_of_an_epochs_end_are_seen(one_pl, make_class, make_trainer, batches):
    """What steps after the last batch of an epoch belongs to that batch's record."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    trainer = make_trainer(one_pl, max_epochs=2)
    with watch_lightning(trainer) as run:
        trainer.fit(make_class(one_pl, configure_optimizers=configure_optimizers)(), loader_of(batches))
    steps = [[event.kind for event in record.events].count("scheduler_step") for record in run.records]
    assert steps == [0, 0, 0, 1, 0, 0, 0, 1]


def test_nothing_is_left_on_the_trainer(pl, make_class, make_trainer, batches, parts):
    """Callbacks and global hooks are as before, and the Trainer trains on."""
    trainer = make_trainer(pl, max_epochs=1)
    callbacks, before = list(trainer.callbacks), parts()
    module = make_class(pl)()
    with watch_lightning(trainer) as run:
        assert trainer.callbacks[: len(callbacks)] == callbacks
        assert len(trainer.callbacks) == len(callbacks) + 1
        trainer.fit(module, loader_of(batches))
    assert trainer.callbacks == callbacks
    assert parts() == before
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader_of(batches))
    assert trainer.global_step == 8
    assert len(run.records) == 4


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_start", "on_train_epoch_end", "on_fit_start"])
def test_exceptions_pass_and_leave_nothing(pl, make_class, make_trainer, batches, parts, hook):
    """What a hook raises passes through ``fit`` and the block; what was recorded stays."""

    def fail(self, *given):
        raise ZeroDivisionError(hook)

    trainer = make_trainer(pl, max_epochs=1)
    callbacks, before = list(trainer.callbacks), parts()
    with pytest.raises(ZeroDivisionError, match=hook), watch_lightning(trainer) as run:
        trainer.fit(make_class(pl, **{hook: fail})(), loader_of(batches))
    assert trainer.callbacks == callbacks
    assert parts() == before
    if hook == "on_fit_start":
        assert error_of(NotJudged, run.check) == NOTHING
    else:
        assert len(run.records) == {"training_step": 1, "on_train_batch_start": 1, "on_train_epoch_end": 4}[hook]


def test_global_hooks_are_there_while_it_watches(one_pl, make_class, make_trainer, batches, parts):
    """The tests above can fail: within ``fit`` something is attached."""
    within = []
    trainer = make_trainer(one_pl, max_epochs=1)
    cls = make_class(one_pl, on_train_batch_end=lambda self, *given: within.append(parts()))
    before = parts()
    with watch_lightning(trainer):
        trainer.fit(cls(), loader_of(batches))
    assert all(one["optimizer post"] != before["optimizer post"] for one in within)
    assert len(within) == 4


def test_a_block_without_a_fit_has_seen_nothing(one_pl, make_trainer):
    """Looking before training has begun is an error, and where none came nothing was judged."""
    with watch_lightning(make_trainer(one_pl)) as run:
        assert error_of(RuntimeError, run.assert_healthy) == NOT_BEGUN
    assert error_of(NotJudged, run.check) == NOTHING


def test_a_second_fit_of_a_module_goes_on(pl, make_class, make_trainer, batches):
    """Fits of one module in one block are one run; that of another module needs a watch of its own."""
    trainer = make_trainer(pl, max_epochs=1)
    module = make_class(pl)()
    with watch_lightning(trainer) as run:
        trainer.fit(module, loader_of(batches))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader_of(batches))
        trainer.fit_loop.max_epochs = 3
        assert error_of(RuntimeError, trainer.fit, make_class(pl)(), loader_of(batches)) == (
            "a second training began inside of one watch: give each a watch of its own"
        )
    assert len(run.records) == 8
    assert str(run.check()) == "Training run: passed"


def test_two_watches_of_one_fit_agree(one_pl, make_class, make_trainer, batches):
    """Blocks may nest."""
    trainer = make_trainer(one_pl, max_epochs=1)
    with watch_lightning(trainer) as outer, watch_lightning(trainer) as inner:
        trainer.fit(make_class(one_pl)(), loader_of(batches))
    assert outer.losses == inner.losses
    assert str(outer.check()) == str(inner.check()) == "Training run: passed"


def test_options_are_passed_on(one_pl, make_class, make_trainer, batches):
    """``track_updates=False`` leaves the updates out, and what is allowed is no finding."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.0)

    cls = make_class(one_pl, configure_optimizers=configure_optimizers)
    for options, rules in (({}, ["lr-zero"]), ({"track_updates": False, "allow": ["lr-zero"]}, [])):
        trainer = make_trainer(one_pl, max_epochs=1)
        with watch_lightning(trainer, **options) as run:
            trainer.fit(cls(), loader_of(batches))
        assert [finding.rule for finding in run.findings] == rules
        assert run.records[0].update_norm == ({} if options else {"optimizer": 0.0})


def test_a_finding_is_raised_with_its_table(one_pl, make_class, make_trainer, batches):
    """``assert_healthy`` raises what it found."""
    trainer = make_trainer(one_pl, max_epochs=1)
    cls = make_class(one_pl, configure_optimizers=lambda self: torch.optim.Adam(self.net[0].parameters(), lr=1e-2))
    with watch_lightning(trainer) as run:
        trainer.fit(cls(), loader_of(batches))
    with pytest.raises(CheckFailed) as error:
        run.assert_healthy()
    assert [finding.rule for finding in error.value.findings] == ["uncovered-parameter"]


def test_bad_arguments_are_named(one_pl, make_trainer):
    """What is no Trainer, and a rule that does not exist, are errors before anything is watched."""
    message = "trainer must be a Trainer of lightning or pytorch_lightning, got {}"
    for given, got in ((None, "a NoneType"), (one_pl.Trainer, "the class Trainer"), (3, "a int")):
        with pytest.raises(TypeError) as error, watch_lightning(given):
            pytest.fail("entered")
        assert str(error.value) == message.format(got)
    trainer = make_trainer(one_pl)
    callbacks = list(trainer.callbacks)
    with pytest.raises(ValueError, match="allow names the rule 'lr-zer'"), watch_lightning(trainer, allow=["lr-zer"]):
        pytest.fail("entered")
    with pytest.raises(TypeError, match="allow"), watch_lightning(trainer, allow="lr-zero"):
        pytest.fail("entered")
    assert trainer.callbacks == callbacks
