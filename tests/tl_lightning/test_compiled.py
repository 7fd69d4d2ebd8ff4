"""Compiled modules: ``fit`` takes ``torch.compile(module)``, and so does everything here."""

from __future__ import annotations

import torch

from tl_lightning import from_lightning, make_lightning_trainer
from tl_telemetry import run_training


def test_a_compiled_module_is_taken_as_fit_takes_it(pl, make_class, batches):
    """``torch.compile(module)`` is a module that ``fit`` looks into, and so do the checks and the Trainer for tests."""

    def make_module():
        return torch.compile(make_class(pl)(), backend="eager")

    make_setup, step = from_lightning(make_module)
    run = run_training(make_setup, batches, step, steps=3)
    run.assert_healthy().assert_num_updates(3)
    assert isinstance(run.setup.model, pl.LightningModule)


def test_a_compiled_module_is_taken_by_the_trainer_for_tests(one_pl, make_class, batches):
    """As above, where the person calls ``fit``."""
    trainer = make_lightning_trainer(max_steps=2)
    module = make_class(one_pl)()
    trainer.fit(torch.compile(module, backend="eager"), torch.utils.data.DataLoader(batches, batch_size=None))
    assert (trainer.global_step, trainer.lightning_module) == (2, module)
