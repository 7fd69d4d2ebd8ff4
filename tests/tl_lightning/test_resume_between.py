"""What lies between the checkpoint and the next batch: what a resumed fit does not make up for, and what it undoes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tl_lightning import check_lightning_resume_equivalent

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def report_of(one_pl, make_class, make_trainer, batches):
    """Check a module with these methods, resumed within an epoch or at its end."""

    def check(*, within=False, callbacks=list, **methods):
        cls = make_class(one_pl, **methods)
        loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader if within else DataLoader
        examples = [one for inputs, targets in batches for one in zip(inputs, targets, strict=True)]
        return check_lightning_resume_equivalent(
            lambda: (
                make_trainer(one_pl, max_epochs=3, callbacks=callbacks()),
                cls(),
                loader(examples, batch_size=8),
            ),
            resume_at=2 if within else 4,
        )

    return check


def causes(report):
    return [(finding.rule, finding.cause) for finding in report.findings]


def lost(what):
    return (
        f"the run that saved changed {what} after the checkpoint was written and before the next batch (Lightning "
        "steps ReduceLROnPlateau, and calls the module's on_train_batch_end(), after callbacks have saved), and the "
        "resumed fit does not make up for that"
    )


def test_weights_that_the_module_clamps_after_the_checkpoint(report_of):
    """Within an epoch, Lightning calls the module's ``on_train_batch_end`` after the callbacks have saved."""

    def clamp(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.mul_(0.5)

    assert causes(report_of(on_train_batch_end=clamp)) == []
    report = report_of(within=True, on_train_batch_end=clamp)
    assert causes(report) == [("resume-diverges", lost("net.0.weight"))]
    assert report.findings[0].fix == (
        "do it in a hook that comes before the checkpoint: training_step(), or on_train_epoch_end()"
    )


def test_a_rate_that_a_hook_sets_back(report_of):
    """A hook at the start of training that does not know of resuming overwrites what was restored."""

    def start(self):
        for group in self.optimizers().param_groups:
            group["lr"] = 1e-2

    def halve(self):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5

    assert causes(report_of(on_train_epoch_end=halve)) == []
    report = report_of(on_train_epoch_end=halve, on_train_start=start)
    assert causes(report) == [
        (
            "resume-diverges",
            "after Lightning has restored the checkpoint, and before the first batch, a hook changes the settings of "
            "'optimizer'",
        )
    ]
    assert report.findings[0].fix == (
        "let on_train_start() and on_train_epoch_start() leave it alone where trainer.global_step is not 0"
    )
