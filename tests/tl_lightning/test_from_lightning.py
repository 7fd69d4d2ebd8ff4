"""A LightningModule as ``make_setup`` and ``step``, run by the checks that take these."""

from __future__ import annotations

import pytest
import torch

from tl_lightning import from_lightning
from tl_resume import check_resume_equivalent
from tl_telemetry import run_training


def error_of(kind, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    return str(error.value)


def scheduled(self):
    optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_healthy_module_passes(pl, make_class, batches):
    """A correct module passes the checks of a run, with a record for each batch."""
    make_setup, step = from_lightning(make_class(pl, configure_optimizers=scheduled))
    run = run_training(make_setup, batches, step, steps=8)
    assert str(run.check()) == "Training run: passed"
    assert [record.optimizer_steps for record in run.records] == [{"optimizer": 1}] * 8
    run.assert_lr(lambda index: 1e-2 * 0.5 ** (index // 2))


def test_a_setup_is_what_the_trainer_built(pl, make_class, batches):
    """Module, optimizer and scheduler are those of the Trainer, which is named as the one that steps them."""
    make_setup, _ = from_lightning(make_class(pl, configure_optimizers=scheduled))
    setup = make_setup("cpu")
    assert isinstance(setup.model, pl.LightningModule)
    assert setup.model.trainer.optimizers == [setup.optimizer]
    assert setup.model.trainer.lr_scheduler_configs[0].scheduler is setup.scheduler
    assert (setup.scaler, setup.driver) == (None, "Lightning")


def test_nobody_but_the_module_steps_with_manual_optimization(pl, make_class, batches):
    """With manual optimization the schedulers are the module's: a setup names no driver."""

    class Manual(make_class(pl, configure_optimizers=scheduled)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, loss = self.optimizers(), self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
            return loss

    make_setup, step = from_lightning(Manual)
    assert make_setup().driver == ""
    assert str(run_training(make_setup, batches, step, steps=8).check()) == "Training run: passed"


def test_the_loss_is_undivided(pl, make_class, batches):
    """With accumulation, a step returns what ``training_step`` did, not what the Trainer made of it."""
    make_setup, step = from_lightning(make_class(pl), trainer_kwargs={"accumulate_grad_batches": 4})
    setup = make_setup()
    expected = setup.model.loss(batches[0])
    assert step(setup, batches[0]).item() == pytest.approx(expected.item(), rel=1e-6)


def test_what_was_logged_stands_for_the_loss(one_pl, make_class, batches):
    """Where ``training_step`` returns none, a step returns what it logged, by name."""

    class Manual(make_class(one_pl)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, loss = self.optimizers(), self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log_dict({"mse": loss, "rmse": loss.sqrt()})

    make_setup, step = from_lightning(Manual)
    run = run_training(make_setup, batches, step, steps=4)
    assert run.records[0].losses.keys() == {"mse", "rmse"}
    assert str(run.check()) == "Training run: passed"


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_has_none(one_pl, make_class, batches):
    """A ``training_step`` that returns nothing trains nothing, and its record has no loss."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)

    make_setup, step = from_lightning(make_class(one_pl, training_step=training_step))
    run = run_training(make_setup, batches, step, steps=4)
    assert [record.loss is None for record in run.records] == [False, True, False, False]
    assert len(run.losses) == 3


def test_an_epoch_has_the_length_that_is_named(one_pl, make_class, batches):
    """Schedulers of the kind "epoch" step after ``epoch_length`` batches, and never where no length is given."""

    def each_epoch(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    cls = make_class(one_pl, configure_optimizers=each_epoch)
    for length, rates in ((3, [1e-2] * 3 + [5e-3] * 3 + [2.5e-3] * 2), (None, [1e-2] * 8)):
        make_setup, step = from_lightning(cls, epoch_length=length)
        run_training(make_setup, batches, step, steps=8).assert_lr(rates)


def test_each_setup_trains_for_itself(one_pl, make_class, batches):
    """Setups of one pair, advanced in turns, do not disturb each other."""
    make_setup, step = from_lightning(make_class(one_pl))
    torch.manual_seed(0)
    first = make_setup()
    torch.manual_seed(0)
    second = make_setup()
    losses = [(step(first, batch).item(), step(second, batch).item()) for batch in batches]
    assert all(one == other for one, other in losses)
    assert first.model.trainer is not second.model.trainer
    assert first.model.trainer.global_step == len(batches)


def test_arguments_of_the_trainer_are_copied(one_pl, make_class, batches):
    """A callback in ``trainer_kwargs`` is a copy in each setup: runs that are compared begin alike."""

    class Counting(one_pl.Callback):
        num = 0

        def on_train_batch_end(self, *given):
            self.num += 1

    given = Counting()
    make_setup, step = from_lightning(make_class(one_pl), trainer_kwargs={"callbacks": [given]})
    first, second = make_setup(), make_setup()
    step(first, batches[0])
    assert (given.num, first.Counting.num, second.Counting.num) == (0, 1, 0)


def test_a_setup_is_saved_and_loaded_by_default(pl, make_class, batches, capsys):
    """``tl_resume`` saves and restores such a setup by itself: counters, progress in the epoch, schedulers."""

    def training_step(self, batch, batch_idx):
        print(self.trainer.current_epoch, batch_idx, self.global_step)
        return self.loss(batch)

    make_setup, step = from_lightning(
        make_class(pl, training_step=training_step, configure_optimizers=scheduled), epoch_length=3
    )
    report = check_resume_equivalent(make_setup, batches, step, steps=8, resume_at=5)
    assert str(report) == "Resume equivalence: passed"
    uninterrupted = [f"{index // 3} {index % 3} {index}" for index in range(8)]
    assert capsys.readouterr().out.splitlines() == [*uninterrupted, *uninterrupted, *uninterrupted[5:]]


@pytest.mark.parametrize("remembers", [True, False])
def test_the_hooks_for_checkpoints_run(pl, make_class, batches, remembers):
    """What ``on_save_checkpoint`` writes comes back to ``on_load_checkpoint``; a module that forgets is found."""

    def init(self):
        super(cls, self).__init__()
        self.factor = 1.0

    def training_step(self, batch, batch_idx):
        self.factor *= 1.1
        return self.loss(batch) * self.factor

    def on_save_checkpoint(self, checkpoint):
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, checkpoint):
        self.factor = checkpoint["factor"]

    hooks = {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint} if remembers else {}
    base = make_class(pl, training_step=training_step, **hooks)
    cls = type("Growing", (base,), {"__init__": init})
    make_setup, step = from_lightning(cls)
    report = check_resume_equivalent(make_setup, batches, step, steps=6)
    if remembers:
        assert str(report) == "Resume equivalence: passed"
    else:
        assert [finding.rule for finding in report.findings] == ["attribute-not-restored"]
        assert "factor" in report.findings[0].seen


def test_bad_arguments_are_named(one_pl, make_class):
    """What cannot work is an error before anything runs."""
    module = make_class(one_pl)()
    message = "make_module must be a function that builds the module anew, got a {}"
    assert error_of(TypeError, from_lightning, module) == message.format("Regression")
    assert error_of(TypeError, from_lightning, 3) == message.format("int")
    assert error_of(TypeError, from_lightning, make_class, trainer_kwargs=[1]) == (
        "trainer_kwargs must be a dict of arguments of Trainer, got a list"
    )
    assert error_of(TypeError, from_lightning, make_class, epoch_length=2.0) == (
        "epoch_length must be an int, got float 2.0"
    )
    assert error_of(TypeError, from_lightning, make_class, epoch_length=True) == (
        "epoch_length must be an int, got bool True"
    )
    assert error_of(ValueError, from_lightning, make_class, epoch_length=0) == "epoch_length must be at least 1, got 0"


@pytest.mark.parametrize(
    ("made", "got"), [(torch.nn.Linear(1, 1), "a Linear"), (None, "a NoneType"), (torch.nn.Linear, "the class Linear")]
)
def test_what_is_no_lightning_module_is_named(one_pl, made, got):
    """``make_module`` has to build a LightningModule of one of the two packages."""
    make_setup, _ = from_lightning(lambda: made)
    assert error_of(TypeError, make_setup) == (
        f"make_module() must be a LightningModule of lightning or pytorch_lightning, got {got}"
    )


def test_a_fit_that_ends_early_says_how_long_it_was(one_pl, make_class, batches):
    """Batches beyond the Trainer's own limits are an error that names these."""
    make_setup, step = from_lightning(make_class(one_pl), trainer_kwargs={"max_steps": 2})
    setup = make_setup()
    step(setup, batches[0])
    step(setup, batches[1])
    assert error_of(RuntimeError, step, setup, batches[2]) == (
        "Trainer.fit has ended after 2 batches: max_steps=2, max_epochs=-1; and another batch came: change "
        "trainer_kwargs, or run fewer steps"
    )


def test_a_fit_that_never_begins_is_an_error(one_pl, make_class):
    """A Trainer that may not train at all is told when the setup is made."""
    make_setup, _ = from_lightning(make_class(one_pl), trainer_kwargs={"max_epochs": 0})
    assert error_of(ValueError, make_setup) == (
        "Trainer.fit ended before the first batch: look at trainer_kwargs and the module's hooks"
    )


def test_exceptions_pass_and_leave_nothing(pl, make_class, batches, parts):
    """What a hook raises passes through, with the hooks for exceptions run and everything global put back."""
    ended = []

    class Watching(pl.Callback):
        def on_exception(self, trainer, module, error):
            ended.append(error)

    def fail(self, batch, batch_idx):
        if batch_idx == 1:
            raise ZeroDivisionError("in training_step")
        return self.loss(batch)

    before = parts()
    make_setup, step = from_lightning(make_class(pl, training_step=fail), trainer_kwargs={"callbacks": [Watching()]})
    with pytest.raises(ZeroDivisionError, match="in training_step"):
        run_training(make_setup, batches, step, steps=3)
    assert [type(error) for error in ended] == [ZeroDivisionError]
    assert parts() == before


def test_an_exception_before_the_first_batch_says_where(one_pl, make_class):
    """One that comes while the setup is made is noted as such."""

    def fail(self):
        raise KeyError("lr")

    make_setup, _ = from_lightning(make_class(one_pl, configure_optimizers=fail))
    with pytest.raises(KeyError) as error:
        make_setup()
    assert error.value.__notes__ == ["raised in Trainer.fit, before the first batch"]


def test_a_fit_ends_with_its_setup(one_pl, make_class, batches, parts):
    """A setup that nobody holds any more ends its ``fit``: no callback takes that for an error of the training."""
    ended = []

    class Cleaning(one_pl.Callback):
        def on_exception(self, trainer, module, error):
            ended.append(type(error).__name__)

    make_setup, step = from_lightning(make_class(one_pl), trainer_kwargs={"callbacks": [Cleaning()]})
    before = parts()
    setup = make_setup()
    step(setup, batches[0])
    assert parts() == before  # between two batches, all is the caller's
    trainer = setup.model.trainer
    assert not trainer.interrupted
    del setup
    assert trainer.interrupted
    assert ended == []
    assert parts() == before


def test_a_module_that_is_built_once_is_an_error(one_pl, make_class):
    """Runs that are compared have to begin alike: ``make_module`` builds the module in each call."""
    module = make_class(one_pl)()
    make_setup, _ = from_lightning(lambda: module)
    make_setup()
    assert error_of(ValueError, make_setup) == (
        "make_module() returned the same module as an earlier call: build it anew in each call"
    )


def test_arguments_that_cannot_be_copied_are_named(one_pl, make_class):
    """A callback that refuses to be copied is told, with what to do instead."""

    class Stubborn(one_pl.Callback):
        def __deepcopy__(self, memo):
            raise RuntimeError("not me")

    make_setup, _ = from_lightning(make_class(one_pl), trainer_kwargs={"callbacks": [Stubborn()]})
    assert error_of(TypeError, make_setup) == (
        "trainer_kwargs is copied for each setup, which one of its values refuses; the module's own "
        "configure_callbacks() can build callbacks anew instead: not me"
    )


def test_a_validation_step_that_has_no_data_is_left_out(pl, make_class, batches):
    """A module that validates too is fed without: nothing warns of the loader that is missing."""

    def validation_step(self, batch, batch_idx):
        raise AssertionError("validated")

    make_setup, step = from_lightning(make_class(pl, validation_step=validation_step), epoch_length=2)
    assert str(run_training(make_setup, batches, step, steps=6).check()) == "Training run: passed"


def test_a_callback_that_stops_is_named(one_pl, make_class, batches):
    """A fit that was stopped from inside says so, and not which limits it had."""

    class Stopping(one_pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer.should_stop = True

    make_setup, step = from_lightning(make_class(one_pl), trainer_kwargs={"callbacks": [Stopping()]})
    setup = make_setup()
    step(setup, batches[0])
    assert error_of(RuntimeError, step, setup, batches[1]) == (
        "Trainer.fit has ended after 1 batch: a callback or the module stopped it (trainer.should_stop); and another "
        "batch came: change trainer_kwargs, or run fewer steps"
    )


@pytest.mark.parametrize("saved", [True, False])
def test_a_callback_is_part_of_what_is_saved(pl, make_class, batches, saved):
    """By default, a callback's ``state_dict`` is saved and loaded; one that has none loses its average."""

    class Average(pl.Callback):
        def __init__(self):
            self.average = {}

        def on_train_batch_end(self, trainer, module, *rest):
            for name, value in module.named_parameters():
                self.average[name] = self.average.get(name, value.detach()).lerp(value.detach(), 0.1)

    if saved:
        Average.state_dict = lambda self: {"average": self.average}
        Average.load_state_dict = lambda self, state: setattr(self, "average", state["average"])
    make_setup, step = from_lightning(make_class(pl), trainer_kwargs={"callbacks": [Average()]})
    report = check_resume_equivalent(make_setup, batches, step, steps=6)
    if saved:
        assert str(report) == "Resume equivalence: passed"
    else:
        assert [str(finding) for finding in report.findings] == [
            """\
[attribute-not-restored] setup.Average.average['net.0.weight'] a float32 tensor of shape (6, 4) when saved, nothing \
after loading; setup.Average.average['net.0.bias'] a float32 tensor of shape (6,) when saved, nothing after loading; \
setup.Average.average['net.3.weight'] a float32 tensor of shape (1, 6) when saved, nothing after loading; \
setup.Average.average['net.3.bias'] a float32 tensor of shape (1,) when saved, nothing after loading; still different \
at the end of the run
  cause: training changes it, and the checkpoint does not carry it; there was no effect on the losses yet
  fix: give setup.Average state_dict() and load_state_dict(), or keep plain data in the setup: save_training_state() \
carries both"""
        ]
