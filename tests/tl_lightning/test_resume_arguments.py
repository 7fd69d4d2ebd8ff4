"""What ``make_fit`` may return, and what goes wrong outside of a resume: errors that name it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader

from tl_lightning import check_lightning_resume_equivalent

PASSED = "Resume equivalence: passed"
FORMS = "(trainer, module), (trainer, module, train_dataloaders or datamodule) or (..., ..., ..., val_dataloaders)"


def error_of(kind, make_fit, **options):
    with pytest.raises(kind) as error:
        check_lightning_resume_equivalent(make_fit, **options)
    return str(error.value)


def loader_of(batches):
    return DataLoader([one for inputs, targets in batches for one in zip(inputs, targets, strict=True)], batch_size=8)


@pytest.fixture
def data_module(pl, batches):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader_of(batches)

    return Data


def test_a_module_may_have_its_loader(pl, make_class, make_trainer, batches):
    """``(trainer, module)`` is enough where the module makes its loader."""
    cls = make_class(pl, train_dataloader=lambda self: loader_of(batches))
    assert str(check_lightning_resume_equivalent(lambda: (make_trainer(pl, max_epochs=3), cls()))) == PASSED


def test_a_data_module_stands_for_the_loaders(pl, make_class, make_trainer, data_module):
    """A data module in the place of the loader is taken as such."""
    cls = make_class(pl)
    fit = lambda: (make_trainer(pl, max_epochs=3), cls(), data_module())  # noqa: E731
    assert str(check_lightning_resume_equivalent(fit)) == PASSED


def test_validation_runs_within(pl, make_class, make_trainer, batches):
    """With a loader for validation, what it logs is at hand, and resuming passes."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    cls = make_class(pl, validation_step=validation_step)
    fit = lambda: (make_trainer(pl, max_epochs=3), cls(), loader_of(batches), loader_of(batches))  # noqa: E731
    assert str(check_lightning_resume_equivalent(fit, resume_at=4)) == PASSED


def test_manual_optimization_resumes(pl, make_class, make_trainer, batches):
    """Two optimizers with their schedulers, stepped by the module, are restored."""

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(self.net[index].parameters(), lr=1e-2) for index in (0, 3)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.log("loss", loss)

    class Manual(make_class(pl, configure_optimizers=configure_optimizers, training_step=training_step)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    fit = lambda: (make_trainer(pl, max_epochs=3), Manual(), loader_of(batches))  # noqa: E731
    assert str(check_lightning_resume_equivalent(fit)) == PASSED


@pytest.mark.parametrize(
    ("made", "got"), [(None, "a NoneType"), ((), "0 elements"), ((1,), "1 elements"), ((1,) * 5, "5 elements")]
)
def test_what_make_fit_must_return(made, got):
    """Its form is named."""
    assert error_of(TypeError, lambda: made) == f"make_fit() must return {FORMS}, got {got}"


def test_trainer_and_module_are_named(one_pl, make_class, make_trainer, batches):
    """Each of the two has its place, and both come from one package."""
    module, trainer = make_class(one_pl)(), make_trainer(one_pl)
    kinds = "of lightning or pytorch_lightning, got a"
    assert error_of(TypeError, lambda: (module, trainer)) == (
        f"the first that make_fit() returns must be a Trainer {kinds} Regression"
    )
    assert error_of(TypeError, lambda: (trainer, torch.nn.Linear(1, 1))) == (
        f"the second that make_fit() returns must be a LightningModule {kinds} Linear"
    )
    other = make_class(pytest.importorskip("pytorch_lightning"))()
    assert error_of(TypeError, lambda: (trainer, other, loader_of(batches))) == (
        "make_fit() returned a Trainer and a module of two packages: lightning and pytorch_lightning"
    )


@pytest.mark.parametrize("what", ["Trainer", "module"])
def test_both_are_built_in_each_call(one_pl, make_class, make_trainer, batches, what):
    """A Trainer or a module from outside would carry the first run into the next."""
    trainer, module = make_trainer(one_pl, max_epochs=3), make_class(one_pl)()

    def make_fit():
        return (
            trainer if what == "Trainer" else make_trainer(one_pl, max_epochs=3),
            module if what == "module" else make_class(one_pl)(),
            loader_of(batches),
        )

    assert error_of(ValueError, make_fit) == (
        f"make_fit() returned the same {what} as an earlier call: build it inside make_fit()"
    )


def test_make_fit_has_to_be_a_function(one_pl, make_trainer):
    """The form is named here as well."""
    assert (
        error_of(TypeError, make_trainer(one_pl)) == f"make_fit must be a function that returns {FORMS}, got a Trainer"
    )


def test_a_fit_that_ends_before_its_steps_is_an_error(one_pl, make_class, make_trainer, batches):
    """The Trainer's limits are named beside the steps that the check needs."""
    cls = make_class(one_pl)
    fit = lambda: (make_trainer(one_pl, max_epochs=1), cls(), loader_of(batches))  # noqa: E731
    assert error_of(ValueError, fit) == (
        "Trainer.fit has ended after 4 batches: max_steps=-1, max_epochs=1; and steps=8 needs 8"
    )
    fit = lambda: (make_trainer(one_pl, max_steps=5), cls(), loader_of(batches))  # noqa: E731
    assert error_of(ValueError, fit, steps=6) == (
        "Trainer.fit has ended after 5 batches: max_steps=5, max_epochs=-1; and steps=6 needs 6"
    )


@pytest.mark.parametrize(("options", "name"), [({"steps": 1}, "steps"), ({"resume_at": 8}, "resume_at")])
def test_bad_numbers_are_named(one_pl, make_class, make_trainer, batches, options, name):
    """Numbers that make no sense are errors before the first run."""
    fit = lambda: (make_trainer(one_pl, max_epochs=3), make_class(one_pl)(), loader_of(batches))  # noqa: E731
    assert error_of(ValueError, fit, **options).startswith(f"{name} must be ")


@pytest.mark.parametrize("when", ["from the beginning", "resumed"])
def test_exceptions_leave_nothing(pl, make_class, make_trainer, batches, parts, tmp_path, monkeypatch, when):
    """What every run raises passes through, what only the resumed one does is a finding; nothing global stays."""
    monkeypatch.chdir(tmp_path)

    def fail(self, batch, batch_idx):
        if self.global_step == 6 and (when == "from the beginning" or hasattr(self, "loaded")):
            raise ZeroDivisionError("in training_step")
        return self.loss(batch)

    cls = make_class(pl, training_step=fail, on_load_checkpoint=lambda self, state: setattr(self, "loaded", True))
    fit = lambda: (make_trainer(pl, max_epochs=3), cls(), loader_of(batches))  # noqa: E731
    before = parts()
    if when == "from the beginning":
        assert error_of(ZeroDivisionError, fit) == "in training_step"
    else:
        (finding,) = check_lightning_resume_equivalent(fit).findings
        assert finding.seen == (
            "module.loaded nothing when saved, True after loading; the resumed run raises ZeroDivisionError "
            "(in training_step) in step 6, where the uninterrupted one goes on; with it put back after loading, the "
            "resumed run is the uninterrupted one"
        )
    gc.collect()
    assert parts() == before
    assert list(tmp_path.iterdir()) == []


def test_a_check_is_silent_and_leaves_no_files(
    pl, make_class, make_trainer, batches, tmp_path, monkeypatch, capfd, caplog, parts
):
    """Trainers that are built and resumed announce nothing, and the folder stays empty."""
    monkeypatch.chdir(tmp_path)
    before, cls = parts(), make_class(pl)
    report = check_lightning_resume_equivalent(lambda: (make_trainer(pl, max_epochs=3), cls(), loader_of(batches)))
    assert str(report) == PASSED
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert parts() == before
