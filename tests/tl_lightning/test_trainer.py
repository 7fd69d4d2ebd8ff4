"""Trainers set up for tests."""

from __future__ import annotations

import gc
import importlib
import logging

import pytest
import torch

from tl_lightning import check_lightning_resume_equivalent, make_lightning_trainer


def test_it_is_a_trainer_that_fits(one_pl, make_class, batches, tmp_path, monkeypatch, capfd, caplog):
    """It trains for few steps, on one device, prints and logs nothing, and leaves an empty folder empty."""
    monkeypatch.chdir(tmp_path)
    trainer = make_lightning_trainer()
    assert isinstance(trainer, one_pl.Trainer)
    trainer.fit(make_class(one_pl)(), torch.utils.data.DataLoader(batches, batch_size=None))
    assert (trainer.global_step, trainer.num_devices, trainer.max_steps) == (8, 1, 8)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_usual_trainer_writes_and_prints(one_pl, make_class, make_trainer, batches, tmp_path, monkeypatch, caplog):
    """The test above can fail: a Trainer as it is makes folders and logs."""
    monkeypatch.chdir(tmp_path)
    logger = one_pl.loggers.CSVLogger(tmp_path)
    trainer = make_trainer(one_pl, max_steps=1, logger=logger, log_every_n_steps=1)
    trainer.fit(make_class(one_pl)(), torch.utils.data.DataLoader(batches, batch_size=None))
    assert list(tmp_path.iterdir()) != []
    assert caplog.records != []


def test_arguments_win(one_pl):
    """What is given holds, and a limit of one's own takes the place of the few steps."""
    assert make_lightning_trainer(max_steps=3).max_steps == 3
    trainer = make_lightning_trainer(max_epochs=2, num_sanity_val_steps=1, gradient_clip_val=0.5)
    assert (trainer.max_epochs, trainer.max_steps) == (2, -1)
    assert (trainer.num_sanity_val_steps, trainer.gradient_clip_val) == (1, 0.5)
    assert make_lightning_trainer(max_time="00:00:00:05").max_steps == -1


def test_calling_it_makes_another_one(one_pl):
    """A call takes the arguments over, and new ones win."""
    trainer = make_lightning_trainer(max_steps=5, gradient_clip_val=0.5)
    other = trainer(max_steps=3)
    assert other is not trainer
    assert (other.max_steps, other.gradient_clip_val) == (3, 0.5)
    assert other(gradient_clip_val=1.0).max_steps == 3
    assert trainer.max_steps == 5


def test_a_device_is_one_device(one_pl):
    """The device may be a string or a torch.device, with a number or without."""
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        trainer = make_lightning_trainer(device=device)
        assert trainer.strategy.root_device == torch.device("cpu")
        assert trainer(max_steps=1).strategy.root_device == torch.device("cpu")


def test_an_unknown_argument_is_an_error(one_pl):
    """What ``Trainer`` does not know, it refuses."""
    with pytest.raises(TypeError, match="max_step"):
        make_lightning_trainer(max_step=3)


def test_fits_of_a_check_leave_the_loggers_levels(one_pl, make_class, batches, caplog):
    """Fits that a check stops on the way put the levels of loggers back, whenever they end."""

    def make_fit():
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        return make_lightning_trainer(max_epochs=4), make_class(one_pl)(), loader

    logger = logging.getLogger(one_pl.__name__)
    caplog.set_level(logging.INFO, logger.name)
    check_lightning_resume_equivalent(make_fit, steps=4)
    gc.collect()
    assert logger.level == logging.INFO


def test_a_module_of_the_other_package_is_told(make_class):
    """Where both packages are imported, a module of the one that the Trainer is not of is an error that says so."""
    trainer = make_lightning_trainer()
    package = type(trainer).__mro__[1].__module__.partition(".")[0]
    other = importlib.import_module("pytorch_lightning" if package == "lightning" else "lightning.pytorch")
    mine = "lightning.pytorch" if package == "lightning" else "pytorch_lightning"
    with pytest.raises(TypeError) as error:
        trainer.fit(make_class(other)())
    assert str(error.value) == (
        f"the module is not one of {mine}, as the Trainer is: lightning and pytorch_lightning have no class in common, "
        "so import only one of them"
    )
