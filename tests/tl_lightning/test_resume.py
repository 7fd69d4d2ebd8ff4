"""``fit`` that is saved, killed and resumed with ``ckpt_path``, beside the one that never was."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from tl_core import CheckFailed
from tl_lightning import assert_lightning_resume_equivalent, check_lightning_resume_equivalent

PASSED = "Resume equivalence: passed"
# torchdata warns at its import
with_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def dataset(batches):
    return TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))


@pytest.fixture
def make_fit(one_pl, make_class, make_trainer, dataset):
    """Return a ``make_fit``: Trainer, module and loader, four batches an epoch."""
    return fits_of(one_pl, make_class, make_trainer, dataset)


@pytest.fixture
def make_either_fit(pl, make_class, make_trainer, dataset):
    """The same for each of the two packages."""
    return fits_of(pl, make_class, make_trainer, dataset)


def fits_of(pl, make_class, make_trainer, dataset):
    def make(*, callbacks=list, loader=DataLoader, dropout=0.0, cls=None, methods=None, arguments=None, **options):
        cls = cls or make_class(pl, dropout=dropout, **(methods or {}))

        def make_fit():
            trainer = make_trainer(pl, **{"max_epochs": 9, "callbacks": callbacks(), **(arguments or {})})
            given = {name: value() if callable(value) else value for name, value in options.items()}
            return trainer, cls(), loader(dataset, batch_size=8, **given)

        return make_fit

    return make


def finding_of(report):
    assert len(report.findings) == 1, str(report)
    return str(report.findings[0])


def rules_of(report):
    return [finding.rule for finding in report.findings]


def stateful(*arguments, **options):
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(*arguments, **options)


class EpochSampler(Sampler):
    """Another order each epoch, which a new process finds again."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 32

    def __iter__(self):
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def seeded_by_step(self, batch, batch_idx):
    torch.manual_seed(100 + self.trainer.global_step)


@pytest.mark.parametrize("resume_at", [None, 4])
def test_a_fit_that_resumes_passes(make_either_fit, resume_at):
    """At an epoch's end, Lightning restores what a plain module and a loader without shuffling need."""
    report = assert_lightning_resume_equivalent(make_either_fit(), steps=8, resume_at=resume_at)
    assert str(report) == PASSED
    assert report.resume_at == 4


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_resume(make_either_fit, interval):
    """Schedulers of both kinds go on where they stood."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    report = check_lightning_resume_equivalent(make_either_fit(methods={"configure_optimizers": configure_optimizers}))
    assert str(report) == PASSED


def test_a_plateau_is_stepped_after_the_checkpoint(make_fit):
    """Lightning saves before it steps a plateau at an epoch's end; one stepped in a hook before that passes."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.plateau, "monitor": "loss"}}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    methods = {"configure_optimizers": configure_optimizers, "training_step": training_step}
    report = check_lightning_resume_equivalent(make_fit(methods=methods))
    assert rules_of(report) == ["resume-diverges"]
    assert report.findings[0].cause == (
        "the run that saved changed scheduler 'scheduler' (ReduceLROnPlateau) after the checkpoint was written and "
        "before the next batch (Lightning steps ReduceLROnPlateau, and calls the module's on_train_batch_end(), after "
        "callbacks have saved), and the resumed fit does not make up for that"
    )


def test_a_shuffling_loader_draws_another_order(make_fit):
    """At an epoch's end, a shuffling loader draws its order from a generator that no checkpoint holds."""
    assert finding_of(check_lightning_resume_equivalent(make_fit(shuffle=True), resume_at=4)).startswith(
        "[rng-not-restored] torch's generator is in another state after loading than when saved, and the loop draws "
        "from it; the runs part at step 4: loss "
    )


def test_a_shuffling_loader_within_an_epoch_loses_its_place(make_fit):
    """Within an epoch the order and the place are lost."""
    report = check_lightning_resume_equivalent(make_fit(shuffle=True), resume_at=6)
    assert rules_of(report) == ["data-position-not-restored"]
    assert report.findings[0].fix == (
        "let the order follow from the epoch's number (a sampler with set_epoch(), which Lightning calls after it has "
        "begun to iterate: the order is to be made when the first index is asked for) and, within an epoch, give the "
        "loader a position: torchdata's StatefulDataLoader has one, any other can only be resumed at the end of an "
        "epoch"
    )


def test_a_sampler_with_set_epoch_passes_at_an_epochs_end(make_fit):
    """The advice above holds: its order comes from the epoch, which Lightning restores."""
    assert str(check_lightning_resume_equivalent(make_fit(sampler=EpochSampler), resume_at=4)) == PASSED


def test_a_sampler_with_set_epoch_has_no_place(make_fit):
    """Within an epoch a loader without a state starts its epoch again."""
    report = check_lightning_resume_equivalent(make_fit(sampler=EpochSampler), resume_at=2)
    assert rules_of(report) == ["data-position-not-restored"]
    assert ": the data start again; " in report.findings[0].seen


@with_torchdata
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_passes_within_an_epoch(make_fit, shuffle):
    """The advice above holds: torchdata's loader has its place in the checkpoint, with its order."""
    report = check_lightning_resume_equivalent(make_fit(loader=stateful, shuffle=shuffle), resume_at=2)
    assert str(report) == PASSED


@with_torchdata
def test_dropout_is_not_restored(make_either_fit):
    """With the data at their place, dropout draws other numbers; the whole finding says what to do about it."""
    report = check_lightning_resume_equivalent(make_either_fit(loader=stateful, dropout=0.3), resume_at=2)
    assert (
        finding_of(report)
        == """\
[rng-not-restored] torch's generator is in another state after loading than when saved, and the loop draws from it; \
the runs part at step 2: loss 1.30175 resumed, 1.47947 without interruption; with it put back after loading, the \
resumed run is the uninterrupted one
  cause: its random numbers (dropout, augmentation, shuffling) are other ones after resuming
  fix: Lightning's checkpoints hold no random state: draw what a step draws from its number, with \
torch.manual_seed(seed + trainer.global_step) in on_train_batch_start(), and the order of the data from the epoch's \
number, with a sampler that has set_epoch()"""
    )


@with_torchdata
@pytest.mark.parametrize(("loader", "resume_at"), [(stateful, 2), (stateful, 4), (DataLoader, 4)])
def test_numbers_drawn_from_the_step_pass(make_fit, loader, resume_at):
    """The advice above holds: ``torch.manual_seed(seed + trainer.global_step)`` in ``on_train_batch_start``."""
    fit = make_fit(loader=loader, dropout=0.3, methods={"on_train_batch_start": seeded_by_step})
    assert str(check_lightning_resume_equivalent(fit, resume_at=resume_at)) == PASSED


@with_torchdata
@pytest.mark.parametrize(("place", "resume_at"), [("load_state_dict", 4), ("on_train_start", 2)])
def test_generators_kept_by_a_callback_pass(one_pl, make_fit, place, resume_at):
    """A state in the checkpoint works too: set when loading for the next epoch's order, at the start within one."""

    class Generators(one_pl.Callback):
        def state_dict(self):
            return {"torch": torch.get_rng_state()}

        def load_state_dict(self, state):
            if place == "load_state_dict":
                torch.set_rng_state(state["torch"])
            else:
                self.state = state["torch"]

        def on_train_start(self, trainer, module):
            if hasattr(self, "state"):
                torch.set_rng_state(self.state)

    fit = make_fit(callbacks=lambda: [Generators()], loader=stateful if resume_at == 2 else DataLoader, dropout=0.3)
    assert rules_of(check_lightning_resume_equivalent(fit, resume_at=resume_at)) == []


def averaging(pl, *, saved):
    class Average(pl.Callback):
        def __init__(self):
            self.average = {}

        def on_train_batch_end(self, trainer, module, *rest):
            for name, value in module.named_parameters():
                self.average[name] = self.average.get(name, value.detach()).lerp(value.detach(), 0.1)

    if saved:
        Average.state_dict = lambda self: {"average": self.average}
        Average.load_state_dict = lambda self, state: setattr(self, "average", state["average"])
    return Average


def test_a_callback_that_loses_its_average(pl, make_either_fit):
    """An EMA that no ``state_dict`` covers is found before it costs anything; with one, it passes."""
    fit = make_either_fit(callbacks=lambda: [averaging(pl, saved=True)()])
    assert str(check_lightning_resume_equivalent(fit)) == PASSED
    fit = make_either_fit(callbacks=lambda: [averaging(pl, saved=False)()])
    assert (
        finding_of(check_lightning_resume_equivalent(fit))
        == """\
[attribute-not-restored] callback Average.average['net.0.weight'] a float32 tensor of shape (6, 4) when saved, nothing \
after loading; callback Average.average['net.0.bias'] a float32 tensor of shape (6,) when saved, nothing after \
loading; callback Average.average['net.3.weight'] a float32 tensor of shape (1, 6) when saved, nothing after loading; \
callback Average.average['net.3.bias'] a float32 tensor of shape (1,) when saved, nothing after loading; still \
different at the end of the run
  cause: training changes it, and the checkpoint does not carry it; there was no effect on the losses yet
  fix: in a callback, return it from state_dict() and set it again in load_state_dict(), which Lightning calls; in the \
module, register a buffer, or use on_save_checkpoint() and on_load_checkpoint()"""
    )


@pytest.mark.parametrize("kept", ["attribute", "buffers", "hooks"])
def test_an_average_in_the_module(one_pl, make_class, make_fit, kept):
    """A plain attribute is lost; buffers, and the hooks for checkpoints, keep it."""

    class Averaging(make_class(one_pl)):
        def __init__(self):
            super().__init__()
            self.average = {name: value.detach().clone() for name, value in self.net.named_parameters()}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for name, value in self.net.named_parameters():
                self.average[name].lerp_(value.detach(), 0.1)

    class Buffers(Averaging):
        def __init__(self):
            super().__init__()
            for name, value in self.average.items():
                self.register_buffer(f"average_{name.replace('.', '_')}", value)

    class Hooks(Averaging):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["average"] = self.average

        def on_load_checkpoint(self, checkpoint):
            self.average = checkpoint["average"]

    cls = {"attribute": Averaging, "buffers": Buffers, "hooks": Hooks}[kept]
    report = check_lightning_resume_equivalent(make_fit(cls=cls))
    if kept == "attribute":
        assert rules_of(report) == ["attribute-not-restored"]
        assert "module.average.0.weight: 24 of 24 elements" in report.findings[0].seen
    else:
        assert str(report) == PASSED


def test_an_attribute_that_decides_names_its_effect(one_pl, make_class, make_fit):
    """What the loss depends on is told with where the runs part."""

    class Growing(make_class(one_pl)):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def training_step(self, batch, batch_idx):
            self.factor *= 1.5
            return self.loss(batch) * self.factor

    report = check_lightning_resume_equivalent(make_fit(cls=Growing))
    assert rules_of(report) == ["attribute-not-restored"]
    assert report.findings[0].seen.startswith(
        "module.factor 5.0625 when saved, 1 after loading; the runs part at step 4"
    )


@with_torchdata
def test_gradients_of_an_unfinished_group_are_lost(make_fit):
    """Between two updates, what was accumulated is in no checkpoint; after one, all is."""
    arguments = {"accumulate_grad_batches": 2}
    fit = make_fit(loader=stateful, arguments=arguments)
    assert str(check_lightning_resume_equivalent(fit, resume_at=2)) == PASSED
    report = check_lightning_resume_equivalent(fit, resume_at=3)
    assert rules_of(report) == ["gradients-not-restored"]
    assert report.findings[0].cause == (
        "fit(ckpt_path=...) left them as make_fit() had built them: the micro-batches that were accumulated so far are "
        "lost to the next update"
    )


def test_a_rule_can_be_allowed(make_fit, one_pl):
    """What is meant is allowed by its rule's name, and what is not raises."""
    fit = make_fit(callbacks=lambda: [averaging(one_pl, saved=False)()])
    with pytest.raises(CheckFailed) as error:
        assert_lightning_resume_equivalent(fit)
    assert rules_of(error.value.report) == ["attribute-not-restored"]
    assert assert_lightning_resume_equivalent(fit, allow=["attribute-not-restored"]).findings == ()


def test_a_trainer_limited_by_steps_trains_on_a_batch_too_many(make_fit):
    """At an epoch's end, Lightning's own resume goes wrong with ``max_steps``; the finding says so."""
    report = check_lightning_resume_equivalent(make_fit(arguments={"max_steps": 50}), resume_at=4)
    assert (
        finding_of(report)
        == """\
[data-position-not-restored] step 5 trained on the batch that step 0 had without interruption: the data are 5 steps \
behind; sample indices 0-7 were repeated, sample indices 24-31 dropped; the runs part at step 5: loss 0.76237 resumed, \
1.21172 without interruption
  cause: the data start at another place after resuming than where the run had stopped; limited by max_steps, \
Lightning goes on with the epoch that was over when it saved: the resumed fit trained on batch 5 of an epoch that has 4
  fix: limit the Trainer by max_epochs in place of max_steps; if this stays: let the order follow from the \
epoch's number (a sampler with set_epoch(), which Lightning calls after it has begun to iterate: the order is to be \
made when the first index is asked for) and, within an epoch, give the loader a position: torchdata's \
StatefulDataLoader has one, any other can only be resumed at the end of an epoch"""
    )


@pytest.mark.parametrize("guarded", [False, True])
def test_a_callback_that_makes_its_state_anew_after_it_was_restored(one_pl, make_fit, guarded):
    """What a hook makes anew after Lightning has restored callbacks is not told as missing in the checkpoint."""

    class Average(one_pl.Callback):
        weights = None

        def on_fit_start(self, trainer, module):
            if not (guarded and self.weights):
                self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}

        def on_train_batch_end(self, trainer, module, *rest):
            for name, parameter in module.named_parameters():
                self.weights[name].lerp_(parameter.detach(), 0.1)

        def state_dict(self):
            return {"weights": self.weights}

        def load_state_dict(self, state):
            self.weights = state["weights"]

    class Derived(Average):
        __module__ = "another_file"  # what restores may be inherited

    report = check_lightning_resume_equivalent(make_fit(callbacks=lambda: [Derived()]), resume_at=4)
    assert rules_of(report) == ([] if guarded else ["attribute-not-restored"])
    if not guarded:
        assert (report.findings[0].cause, report.findings[0].fix) == (
            "the callback has a load_state_dict(), and something else is there when training goes on: state_dict() "
            "does not return it, or on_fit_start() or on_train_start(), which Lightning calls after it has restored "
            "callbacks, makes it anew",
            "return it from state_dict() and set it in load_state_dict(); let on_fit_start() and on_train_start() make "
            "it only where it is not there yet",
        )
