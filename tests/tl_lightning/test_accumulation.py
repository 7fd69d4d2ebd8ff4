"""``accumulate_grad_batches``, and manual optimization that accumulates, beside full batches."""

from __future__ import annotations

import pytest
import torch

from tl_core import CheckFailed
from tl_lightning import assert_lightning_accumulation_equivalent, check_lightning_accumulation_equivalent

PASSED = "Gradient accumulation: passed"


def finding_of(report):
    assert len(report.findings) == 1, str(report)
    return str(report.findings[0])


def error_of(kind, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    return str(error.value)


@pytest.fixture
def make_manual(pl, make_class):
    """Make a module that accumulates ``k`` batches by itself."""

    def make(k, *, divides=True, last=False):
        class Manual(make_class(pl)):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch, batch_idx):
                optimizer, loss = self.optimizers(), self.loss(batch)
                self.manual_backward(loss / k if divides else loss)
                if (batch_idx + 1) % k == 0 or (last and self.trainer.is_last_batch):
                    optimizer.step()
                    optimizer.zero_grad()
                return loss

        return Manual()

    return make


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}],
    ids=["plain", "clipped norm", "clipped values"],
)
def test_a_plain_module_passes(pl, make_class, batches, arguments):
    """What Lightning divides and clips for a mean over the batch is the full batch's update."""
    report = assert_lightning_accumulation_equivalent(make_class(pl), batches, trainer_kwargs=arguments)
    assert str(report) == PASSED


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_pass(one_pl, make_class, batches, interval):
    """Lightning steps a scheduler once an update, or once an epoch, with and without accumulation."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    cls = make_class(one_pl, configure_optimizers=configure_optimizers)
    assert str(check_lightning_accumulation_equivalent(cls, batches, epoch_length=8)) == PASSED


def test_dropout_is_switched_off(one_pl, make_class, batches):
    """Dropout is off in all runs, unless it is asked for: a batch's masks are others than those of its parts."""

    def training_step(self, batch, batch_idx):
        return (self.loss(batch) + self.loss(batch)) / 2

    cls = make_class(one_pl, dropout=0.5, training_step=training_step)
    assert str(check_lightning_accumulation_equivalent(cls, batches)) == PASSED
    report = check_lightning_accumulation_equivalent(cls, batches, disable_dropout=False)
    assert [note.rule for note in report.notes] == ["noise"]


def test_a_loss_that_is_a_sum(one_pl, make_class, batches):
    """A sum over the batch is divided by the Trainer, and added, not averaged."""

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum")

    report = check_lightning_accumulation_equivalent(make_class(one_pl, training_step=training_step), batches)
    assert (
        finding_of(report)
        == """\
[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 0.25x the full batch's (norm 5.93 instead of 23.7)
  cause: the loss is a sum over the batch and is divided by the 4 accumulation steps: sums of micro-batches are added, \
not averaged
  fix: return a mean over the batch from training_step: the Trainer divides sums, too, by accumulate_grad_batches"""
    )


def test_a_loss_that_is_divided_twice(one_pl, make_class, batches):
    """A module that divides as well as the Trainer trains with a fraction of the gradients."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.trainer.accumulate_grad_batches

    report = check_lightning_accumulation_equivalent(make_class(one_pl, training_step=training_step), batches)
    assert (
        finding_of(report)
        == """\
[loss-divided-twice] cycle 1 of 2: the accumulated gradients are 0.25x the full batch's (norm 0.741 instead of 2.97)
  cause: the loss is divided by the 4 accumulation steps twice
  fix: return the undivided loss from training_step: the Trainer divides it by accumulate_grad_batches"""
    )


def test_means_over_unequal_numbers(one_pl, make_class, batches):
    """A mean over the elements that count is no mean of means, which Lightning makes."""

    def training_step(self, batch, batch_idx):
        counts = (batch[0][:, :1] > 0).float()
        return ((self.net(batch[0]) - batch[1]).square() * counts).sum() / counts.sum().clamp(min=1)

    cls = make_class(one_pl, training_step=training_step)
    report = check_lightning_accumulation_equivalent(cls, batches, accumulation_steps=2)
    assert [finding.rule for finding in report.findings] == ["mean-of-means"]
    assert report.findings[0].fix == (
        "Lightning averages what training_step returns and cannot count ahead: let all batches have as many elements "
        "that count, or accumulate by manual optimization, with the sum divided by the whole group's count"
    )


def test_an_incomplete_last_group(one_pl, make_class, batches):
    """Lightning divides by ``accumulate_grad_batches`` in an epoch's last group too, however small."""
    report = check_lightning_accumulation_equivalent(make_class(one_pl), batches, epoch_length=6)
    assert (
        finding_of(report)
        == """\
[last-group-scale] the update of the last 2 micro-batches of an epoch of 6 (groups of 4, incomplete last group of 2) \
uses gradients 0.5x the full batch's
  cause: its losses are divided by 4, the size of a complete group, and not by the 2 that there are
  fix: Lightning divides by accumulate_grad_batches in an epoch's last group too: let the epoch's length be a multiple \
of it (drop_last=True, limit_train_batches), or accumulate by manual optimization"""
    )
    assert str(check_lightning_accumulation_equivalent(make_class(one_pl), batches, epoch_length=8)) == PASSED


def test_a_clip_in_every_micro_batch(one_pl, make_class, batches):
    """``backward`` overridden with a clip bounds parts of the sum."""

    def backward(self, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    report = check_lightning_accumulation_equivalent(make_class(one_pl, backward=backward), batches)
    assert [finding.rule for finding in report.findings] == ["clip-per-micro-batch"]


def test_gradients_cleared_in_every_micro_batch(one_pl, make_class, batches):
    """A hook that clears the gradients of each batch leaves the last one's."""

    def on_train_batch_start(self, batch, batch_idx):
        self.zero_grad()

    report = check_lightning_accumulation_equivalent(
        make_class(one_pl, on_train_batch_start=on_train_batch_start), batches
    )
    assert [finding.rule for finding in report.findings] == ["zeroed-per-micro-batch"]


def average_of(pl, *, once_an_update):
    """A callback that keeps an average of the weights."""

    class Average(pl.Callback):
        def on_train_start(self, trainer, module):
            self.average, self.seen = [parameter.detach().clone() for parameter in module.parameters()], 0

        @torch.no_grad()
        def on_train_batch_end(self, trainer, module, *rest):
            if once_an_update and trainer.global_step == self.seen:
                return
            self.seen = trainer.global_step
            for held, parameter in zip(self.average, module.parameters(), strict=True):
                held.lerp_(parameter, 0.1)

    return Average()


def test_an_average_that_moves_in_every_micro_batch(one_pl, make_class, batches):
    """A callback is named as such, with what Lightning has to tell an update by."""
    report = check_lightning_accumulation_equivalent(
        make_class(one_pl), batches, trainer_kwargs={"callbacks": [average_of(one_pl, once_an_update=False)]}
    )
    seen, cause, fix = finding_of(report).splitlines()
    assert seen.startswith(
        "[state-per-micro-batch] callback Average moved in micro-batches 1, 2, 3 and 4 of 4 of cycle 2 of 2; with the "
        "full batch, it moved once; average.0 moved by "
    )
    assert cause == "  cause: it is updated in every micro-batch instead of after each update"
    assert fix == (
        "  fix: update it only where trainer.global_step has grown since the last call: the hooks around a batch are "
        "called for each micro-batch"
    )


def test_an_average_that_moves_once_an_update_passes(one_pl, make_class, batches):
    """The change that the finding asks for mends it."""
    report = check_lightning_accumulation_equivalent(
        make_class(one_pl), batches, trainer_kwargs={"callbacks": [average_of(one_pl, once_an_update=True)]}
    )
    assert str(report) == PASSED


def test_manual_optimization_passes(make_manual, batches):
    """A module that accumulates by itself is built for as many batches as it is to accumulate."""
    assert str(assert_lightning_accumulation_equivalent(make_manual, batches)) == PASSED


def test_manual_optimization_that_forgets_to_divide(make_manual, batches):
    """Its gradients are as many times too large as there are micro-batches."""
    with pytest.raises(CheckFailed) as error:
        assert_lightning_accumulation_equivalent(lambda k: make_manual(k, divides=False), batches)
    assert (
        finding_of(error.value.report)
        == """\
[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 11.9 instead of 2.97)
  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps
  fix: call backward() on loss / k"""
    )


def test_manual_optimization_has_to_be_built_for_its_number(make_manual, batches):
    """A module that accumulates by itself and is not told of the number cannot be checked."""
    assert error_of(ValueError, check_lightning_accumulation_equivalent, lambda: make_manual(4), batches) == (
        "Manual has manual optimization, for which the Trainer does not accumulate: pass make_module(k), which builds "
        "a module that accumulates k batches by itself"
    )


def test_layers_with_statistics_of_the_batch_cannot_be_judged(one_pl, make_class, batches):
    """BatchNorm is another function of a micro-batch: that is told, not taken for a mistake."""

    class Normed(make_class(one_pl)):
        def __init__(self):
            super().__init__()
            self.net.insert(1, torch.nn.BatchNorm1d(6))

    report = check_lightning_accumulation_equivalent(Normed, batches)
    assert not report.judged
    assert [note.rule for note in report.notes] == ["not-judged"]


def test_a_rule_can_be_allowed(one_pl, make_class, batches):
    """What is meant is allowed by its rule's name."""
    report = assert_lightning_accumulation_equivalent(
        make_class(one_pl), batches, epoch_length=6, allow=["last-group-scale"]
    )
    assert report.findings == ()


def test_bad_arguments_are_named(one_pl, make_class, batches):
    """What cannot work is an error that names the argument."""
    check, cls = check_lightning_accumulation_equivalent, make_class(one_pl)
    assert error_of(ValueError, check, cls, batches, trainer_kwargs={"accumulate_grad_batches": 2}) == (
        "trainer_kwargs must leave out accumulate_grad_batches: the check sets it, to 1 and to accumulation_steps"
    )
    assert error_of(TypeError, check, cls(), batches) == (
        "make_module must be a function that builds the module anew, got a Regression"
    )
    assert error_of(TypeError, check, cls, batches, trainer_kwargs=3) == (
        "trainer_kwargs must be a dict of arguments of Trainer, got a int"
    )
    assert error_of(ValueError, check, cls, batches, accumulation_steps=1).startswith("accumulation_steps must be ")
    assert error_of(ValueError, check, cls, batches, epoch_length=0).startswith("epoch_length must be ")
    assert error_of(ValueError, check, cls, batches, cycles=0).startswith("cycles must be ")
    assert error_of(ValueError, check, cls, batches, allow=["nothing"]).startswith("allow names the rule 'nothing'")
