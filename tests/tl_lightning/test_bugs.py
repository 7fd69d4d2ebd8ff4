"""Mistakes in a module or a callback, named in full; each beside the twin without it, which passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tl_lightning import from_lightning, watch_lightning
from tl_telemetry import run_training

PASSED = "Training run: passed"


@pytest.fixture(params=["fed", "watched"])
def report_of(request, make_trainer, batches):
    """Run a module in one of the two ways, for two epochs of four batches; return the report."""

    def run(pl, cls, **arguments):
        if request.param == "fed":
            make_setup, step = from_lightning(cls, epoch_length=4, trainer_kwargs=arguments)
            return run_training(make_setup, batches, step, steps=8).check()
        torch.manual_seed(0)
        trainer = make_trainer(pl, max_epochs=2, **arguments)
        with watch_lightning(trainer) as run:
            trainer.fit(cls(), DataLoader(batches, batch_size=None))
        return run.check()

    return run


def finding_of(report: Any) -> str:
    assert len(report.findings) == 1, str(report)
    return str(report.findings[0])


def scheduled(interval):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    return configure_optimizers


def test_a_module_that_steps_its_scheduler_as_well(pl, make_class, report_of):
    """A call of ``scheduler.step()`` in a hook is found beside that of the Trainer."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.lr_schedulers().step()

    healthy = make_class(pl, configure_optimizers=scheduled("step"))
    assert str(report_of(pl, healthy)) == PASSED
    buggy = make_class(pl, configure_optimizers=scheduled("step"), on_train_batch_end=on_train_batch_end)
    assert (
        finding_of(report_of(pl, buggy))
        == """\
[scheduler-stepped-twice] 'scheduler' (CosineAnnealingLR) stepped 16 times in 8 updates (steps 0-7)
  cause: Lightning steps it by itself, and so does code of your own: the schedule runs ahead
  fix: take the call of its step() out of your code (a hook, a callback), and leave it to the Trainer"""
    )


def test_a_callback_that_steps_the_scheduler_at_an_epochs_end(one_pl, make_class, report_of):
    """Once too often an epoch is enough."""

    class Stepping(one_pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            module.lr_schedulers().step()

    cls = make_class(one_pl, configure_optimizers=scheduled("epoch"))
    assert report_of(one_pl, cls).findings == ()
    assert finding_of(report_of(one_pl, cls, callbacks=[Stepping()])).startswith(
        "[scheduler-stepped-twice] 'scheduler' (CosineAnnealingLR) stepped 4 times in 8 updates (steps 3, 7)\n"
    )


def test_a_layer_that_no_optimizer_has(pl, make_class, report_of):
    """``configure_optimizers`` that misses a layer is found, with the layer's name."""
    cls = make_class(pl, configure_optimizers=lambda self: torch.optim.Adam(self.net[0].parameters(), lr=1e-2))
    assert (
        finding_of(report_of(pl, cls))
        == """\
[uncovered-parameter] 2 of 4 trainable parameters are in no optimizer: net.3.* (2 tensors)
  cause: no optimizer was given them. Either they were left out when it was built, or they were added to the model or \
unfrozen afterwards
  fix: build the optimizer from model.parameters() once the model is complete, or add them with add_param_group(); if \
they are not meant to train, freeze them with requires_grad_(False) or pass ignore="""
    )


def test_a_closure_that_is_forgotten(pl, make_class, report_of, parts):
    """``optimizer_step`` without its closure never runs ``training_step``: Lightning's own error passes through."""

    def forgetting(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step()

    def passing(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    assert str(report_of(pl, make_class(pl, optimizer_step=passing))) == PASSED
    before = parts()
    with pytest.raises(Exception, match="The closure hasn't been executed") as error:
        report_of(pl, make_class(pl, optimizer_step=forgetting))
    assert type(error.value).__name__ == "MisconfigurationException"
    assert parts() == before


def test_a_closure_that_is_called_by_hand(one_pl, make_class, report_of):
    """``optimizer_step`` may call the closure before the update."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step()

    assert report_of(one_pl, make_class(one_pl, optimizer_step=optimizer_step)).findings == ()


def test_gradients_that_are_never_cleared(pl, make_class, report_of):
    """``optimizer_zero_grad`` overridden with nothing leaves the gradients of earlier updates."""
    cls = make_class(pl, optimizer_zero_grad=lambda self, epoch, batch_idx, optimizer: None)
    assert (
        finding_of(report_of(pl, cls))
        == """\
[missing-zero-grad] the gradients that 'optimizer' stepped with still held those of its earlier updates (7 of 8 \
updates, steps 1-7): at step 7 a norm of 12.5 was left over when backward() added to it, and the sum had a norm of 14.6
  cause: nothing cleared them between an update and the next backward(), which adds to what it finds
  fix: call zero_grad() in the closure, before backward()"""
    )


def test_an_optimizer_that_the_module_steps_as_well(one_pl, make_class, report_of):
    """An update by hand in a hook, beside the Trainer's own, is a repeated step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().step()

    assert (
        finding_of(report_of(one_pl, make_class(one_pl, on_train_batch_end=on_train_batch_end)))
        == """\
[repeated-step] 'optimizer' stepped again with gradients that it had used already: no backward pass ran in between \
(8 of 16 updates, steps 0-7)
  cause: step() is called a second time in the same step, for example by a helper and again by the loop
  fix: call step() once for each backward pass, or once for each accumulation cycle"""
    )


def test_a_part_that_is_detached(one_pl, make_class, report_of):
    """Layers whose output leaves the graph get no gradient, and are named."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0])).detach()
        return torch.nn.functional.mse_loss(self.net[3](hidden), batch[1])

    assert (
        finding_of(report_of(one_pl, make_class(one_pl, training_step=training_step)))
        == """\
[no-gradient] net.0.* (2 tensors) never got a gradient in 8 steps, while 2 other parameters got one; their forward \
pass ran with gradients on
  cause: undecided: the output leaves the graph on the way to the loss (`.detach()`, `.data`, `.item()`, a copy \
through numpy), or does not enter the loss at all
  fix: let the output reach the loss without leaving the graph; if this part is not meant to train, freeze it with \
requires_grad_(False), or pass ignore="""
    )


def test_a_manual_optimization_that_forgets_to_clear(pl, make_class, report_of):
    """Manual optimization is judged like a loop of one's own."""

    def init(self):
        super(cls, self).__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss

    cls = type("Manual", (make_class(pl, training_step=training_step),), {"__init__": init})
    report = report_of(pl, cls)
    assert [finding.rule for finding in report.findings] == ["missing-zero-grad"]


def test_a_module_that_steps_a_scheduler_of_manual_optimization_once(pl, make_class, report_of):
    """With manual optimization the module's own call is the only one: once an update passes."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return loss

    def init(self):
        super(cls, self).__init__()
        self.automatic_optimization = False

    base = make_class(pl, training_step=training_step, configure_optimizers=scheduled("step"))
    cls = type("Manual", (base,), {"__init__": init})
    assert str(report_of(pl, cls)) == PASSED
