"""The resume check on trainer.train(resume_from_checkpoint=...): what passes, and what is lost, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from tl_core import CheckFailed
from tl_hf import assert_hf_resume_equivalent, check_hf_resume_equivalent


class Average(TrainerCallback):
    """An exponential average of the weights."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            now = parameter.detach()
            self.average[name] = now.clone() if name not in self.average else self.average[name].lerp(now, 0.1)


class SavedAverage(Average, ExportableState):
    """The same, in the checkpoint."""

    def __init__(self, average: dict[str, Any] | None = None) -> None:
        self.average = {name: torch.tensor(values) for name, values in (average or {}).items()}

    def state(self) -> dict[str, Any]:
        return {"args": {"average": {name: tensor.tolist() for name, tensor in self.average.items()}}, "attributes": {}}


class ForgetfulAverage(SavedAverage):
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


class Raises(TrainerCallback):
    """Raises the weight decay at the fifth update that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.seen += 1
        if self.seen == 5:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.5


class Remembers(TrainerCallback):
    """Keeps a history that nothing depends on."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.updates.append(state.global_step)


class Decays(Trainer):
    """Weighs the loss by an attribute of its own that moves."""

    def compute_loss(self, *args, **kwargs):
        self.weight = getattr(self, "weight", 1.0) * 0.9
        return super().compute_loss(*args, **kwargs) * (1 + self.weight)


CALLS = [0]


class Counts(Trainer):
    def compute_loss(self, *args, **kwargs):
        CALLS[0] += 1
        return super().compute_loss(*args, **kwargs) * (1 + CALLS[0] / 10)


class Masks(Dataset):
    """Masks tokens at random, with a generator of its own or the global one."""

    def __init__(self, data: dict[str, torch.Tensor], generator: torch.Generator | None = None) -> None:
        self.data, self.generator = data, generator

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        example = {name: tensor[index].clone() for name, tensor in self.data.items()}
        example["input_ids"][self.masked(index)] = 0
        return example

    def masked(self, index: int) -> torch.Tensor:
        return torch.rand(8, generator=self.generator) < 0.3


class MasksByIndex(Masks):
    def masked(self, index: int) -> torch.Tensor:
        return torch.rand(8, generator=torch.Generator().manual_seed(index)) < 0.3


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
EXACT: dict[str, dict[str, Any]] = {
    "shuffled, with dropout": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 9},
    "at the end of an epoch": {"num_train_epochs": 2, "per_device_train_batch_size": 10},
    "evaluated": {**EVALUATED, "logging_strategy": "steps", "logging_steps": 1},
    "bfloat16": {"bf16": True},
    "SGD with momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "Adafactor": {"optim": "adafactor"},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "average in the checkpoint": {"callbacks": [SavedAverage], "restore_callback_states_from_checkpoint": True},
    "early stopping": {
        **EVALUATED,
        "callbacks": [lambda: EarlyStoppingCallback(3)],
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "restore_callback_states_from_checkpoint": True,
    },
}


def maker(hf: Any, model: Any = None, data: Any = None, **arguments: Any) -> Any:
    def make_trainer() -> Trainer:
        callbacks = [make() for make in arguments.get("callbacks", [])]
        given = {**arguments, "callbacks": callbacks}
        return hf.trainer(hf.llama(0.2) if model is None else model(), data, eval_dataset=hf.tokens(8), **given)

    return make_trainer


@pytest.mark.parametrize("name", EXACT)
def test_what_the_trainer_restores_is_exact(hf, name):
    """Dropout, shuffling, the place in the data, schedules and optimizers go on as if nothing had been."""
    assert str(check_hf_resume_equivalent(maker(hf, **EXACT[name]))) == "Resume equivalence: passed"


@pytest.mark.parametrize("resume_at", [1, 5, 7])
def test_it_resumes_anywhere(hf, resume_at):
    """Within an epoch, and where one ends, with groups that are incomplete."""
    report = check_hf_resume_equivalent(
        maker(hf, gradient_accumulation_steps=3, max_steps=8), resume_at=resume_at, seed=3
    )
    assert (str(report), report.resume_at) == ("Resume equivalence: passed", resume_at)


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_other_models_pass_too(hf, model):
    """Nothing hangs on Llama."""
    data = hf.classes() if model == "bert" else hf.tokens()
    assert check_hf_resume_equivalent(maker(hf, getattr(hf, model), data)).ok


def test_a_model_that_the_trainer_builds(hf):
    """model_init is called by each Trainer, under its own seed."""
    report = check_hf_resume_equivalent(
        lambda: hf.trainer(None, model_init=lambda: hf.llama(0.2), gradient_accumulation_steps=2)
    )
    assert str(report) == "Resume equivalence: passed"


PLAINLY = (
    'as plain data: under "attributes" what is set as it is, and under "args" what __init__ takes and makes something '
    "of (a tensor, which tolist() makes a list of, comes back as that list)"
)
NOT_IN_CHECKPOINT = (
    "  cause: training changes it, and a checkpoint holds nothing of a callback that is no ExportableState\n"
    f"  fix: derive {{}} from ExportableState too, have state() return it {PLAINLY}, and set "
    "restore_callback_states_from_checkpoint=True; or write it to a file beside the checkpoint in on_save() and read "
    "it "
    "in on_train_begin()"
)
KEEP = (
    "keep it in a TrainerCallback that is an ExportableState, which the checkpoint holds (with "
    "restore_callback_states_from_checkpoint=True), or compute it from state.global_step"
)


def lost_average(name: str) -> str:
    layers = ("embed_tokens", *(f"layers.0.self_attn.{kind}_proj" for kind in "qkv"))
    tensors = [
        f"callback {name}.average['model.{layer}.weight'] a float32 tensor of shape ({rows}, 16) when saved, nothing "
        "after "
        "loading"
        for layer, rows in zip(layers, (32, 16, 16, 16), strict=True)
    ]
    return f"[attribute-not-restored] {'; '.join(tensors)}; and 17 more; still different at the end of the run\n"


def findings(hf: Any, *, model: Any = None, data: Any = None, **arguments: Any) -> list[str]:
    return list(map(str, check_hf_resume_equivalent(maker(hf, model, data, **arguments)).findings))


def test_a_callback_that_loses_its_average(hf):
    """The average of the weights starts anew, although the losses agree; what would carry it is told."""
    with pytest.raises(CheckFailed) as caught:
        assert_hf_resume_equivalent(maker(hf, callbacks=[Average]))
    told = lost_average("Average") + NOT_IN_CHECKPOINT.format("Average")
    assert str(caught.value) == f"Resume equivalence: failed, 1 finding\n\n{told}"


def test_a_callback_whose_saved_state_is_not_looked_at(hf):
    """transformers restores the states of callbacks only where it is told to."""
    assert findings(hf, callbacks=[SavedAverage]) == [
        f"{lost_average('SavedAverage')}"
        "  cause: the checkpoint holds what state() of the callback returns, and the resumed Trainer does not look at "
        "it\n"
        "  fix: set restore_callback_states_from_checkpoint=True in TrainingArguments"
    ]


def test_a_callback_whose_state_lacks_something(hf):
    """What state() leaves out is lost."""
    assert findings(hf, callbacks=[ForgetfulAverage], restore_callback_states_from_checkpoint=True) == [
        f"{lost_average('ForgetfulAverage')}"
        "  cause: state() of the callback does not return it, or its class does not restore it from that\n"
        f"  fix: have state() return it {PLAINLY}"
    ]


def test_a_callback_that_acts_by_a_lost_counter(hf):
    """The trainings part where it would have acted."""
    assert findings(hf, callbacks=[Raises]) == [
        "[attribute-not-restored] callback Raises.seen 4 when saved, 0 after loading; the runs part at step 5: after "
        "it, "
        "model.embed_tokens.weight has norm 0.561283 resumed, 0.560258 without interruption; with it put back after "
        f"loading, the resumed run is the uninterrupted one\n{NOT_IN_CHECKPOINT.format('Raises')}"
    ]


def test_a_history_may_start_anew(hf):
    """What has no effect is a note."""
    report = assert_hf_resume_equivalent(maker(hf, callbacks=[Remembers]))
    assert [note.seen for note in report.notes] == [
        "not restored, and no effect of it was seen in 8 steps: callback Remembers.updates a list of 4 items when "
        "saved, a "
        "list of 0 items after loading"
    ]
    assert report.notes[0].fix.startswith("nothing if training does not use it; else derive Remembers from Exportable")


def test_an_attribute_of_the_trainers_own_class(hf):
    """A checkpoint holds nothing of it."""
    assert findings(hf, trainer_class=Decays) == [
        "[attribute-not-restored] trainer.weight 0.6561 when saved, nothing after loading; the runs part at step 4: "
        "loss "
        "6.68854 resumed, 5.59897 without interruption; with it put back after loading, the resumed run is the "
        "uninterrupted one\n"
        "  cause: training changes it, and a checkpoint holds nothing of attributes that a class of one's own gives "
        "the "
        f"Trainer\n  fix: {KEEP}"
    ]


class Sharpening(nn.Module):
    """A classifier whose loss weighs more with each call, by a number that no buffer holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 2), 1.0

    def forward(self, input_ids, labels):
        self.weight += 0.5
        return {"loss": self.weight * nn.functional.cross_entropy(self.layer(input_ids.float() / 32), labels)}


def test_an_attribute_of_the_model(hf):
    """What the model counts without a buffer is named as the Trainer's model has it."""
    (finding,) = findings(hf, model=Sharpening, data=hf.classes())
    seen, cause, fix = finding.splitlines()
    assert seen.startswith("[attribute-not-restored] trainer.model.weight 3 when saved, 1 after loading; the runs part")
    assert cause == (
        "  cause: training changes it, trainer.train(resume_from_checkpoint=...) leaves it as it was built: it lies "
        "outside of the model's buffers, which no state_dict() covers"
    )
    assert fix == (
        "  fix: save trainer.model.weight in the checkpoint, or make a buffer of it, which state_dict() carries"
    )


def test_a_global_that_the_loss_uses(hf):
    """It is found through the Trainer's class, and set back between the trainings."""
    calls = CALLS[0]
    told = findings(hf, trainer_class=Counts)
    assert [calls] == CALLS
    place = told[0].partition("] ")[2].partition(" 4 when")[0]
    assert place.endswith("CALLS[0]")
    assert told == [
        f"[outside-state-not-restored] {place} 4 when saved, 0 after loading; the runs part at step 4: loss 3.87231 "
        "resumed, 5.28042 without interruption; with it put back after loading, the resumed run is the uninterrupted "
        "one\n  cause: training changes it, and a checkpoint holds nothing of what lies outside of the Trainer\n"
        f"  fix: {KEEP}"
    ]


def test_random_augmentation(hf):
    """The Trainer restores the generators after it has drawn the first batches: dropout is exact, a dataset is not."""
    assert findings(hf, data=Masks(hf.tokens())) == [
        "[rng-not-restored] the runs part at step 4: loss 3.43981 resumed, 3.44267 without interruption; given the "
        "batches "
        "of the uninterrupted run, the resumed run is equal to it; drawing a batch moves torch's random generator\n"
        "  cause: the dataset or the collator draws random numbers (augmentation, masking), and the Trainer restores "
        "the "
        "generators only after it has drawn the first batches of the resumed run, one of them ahead\n"
        "  fix: make what is drawn a function of the example and the epoch (a generator seeded with both), or draw it "
        "in "
        "the model, whose random numbers are restored"
    ]
    assert findings(hf, data=MasksByIndex(hf.tokens())) == []


def test_augmentation_from_a_generator_of_its_own(hf):
    """Nothing of the process shows where it stands: the batches are what differs, and candidates are told."""

    def make_trainer() -> Trainer:
        return hf.trainer(data=Masks(hf.tokens(), torch.Generator().manual_seed(1)))

    assert [(f.rule, f.cause, f.fix) for f in check_hf_resume_equivalent(make_trainer).findings] == [
        (
            "resume-diverges",
            "the data give other batches after resuming; left open: random numbers that the dataset or the collator "
            "draws "
            "from a generator of its own or in a loader's worker, an order of samples without a seed, what dataset or "
            "collator count",
            "make what the dataset and the collator draw, and the order of the examples, a function of the example "
            "and the epoch",
        )
    ]


def test_data_that_are_not_skipped(hf):
    """ignore_data_skip=True trains on the epoch's first batches again."""
    told = check_hf_resume_equivalent(maker(hf, ignore_data_skip=True)).findings
    assert [(f.rule, f.cause, f.fix) for f in told] == [
        (
            "data-position-not-restored",
            "ignore_data_skip=True: the resumed training begins the epoch anew instead of going on in it",
            "set ignore_data_skip=False",
        )
    ]
    assert told[0].seen.startswith("step 4 trained on the batch that step 0 had without interruption: ")


def test_checkpoints_of_the_model_alone(hf):
    """save_only_model=True is named as the cause of all that is missing."""
    report = check_hf_resume_equivalent(maker(hf, save_only_model=True))
    [finding] = report.findings
    assert (finding.rule, finding.cause, finding.fix) == (
        "optimizer-state-not-restored",
        "save_only_model=True leaves optimizer, scheduler and random numbers out of the checkpoint",
        "set save_only_model=False for checkpoints that a training resumes from",
    )
    others = "param-groups-not-restored, scheduler-not-restored, resume-diverges"
    assert finding.seen.endswith(f"; and {others}")


def test_a_finding_may_be_allowed(hf):
    """By its rule's id, as in every check."""
    assert check_hf_resume_equivalent(maker(hf, callbacks=[Average]), allow=["attribute-not-restored"]).ok


def test_two_callbacks_of_one_class_are_told_apart(hf):
    """By their order."""
    told = check_hf_resume_equivalent(maker(hf, callbacks=[Remembers, Remembers])).notes
    assert sorted(note.seen.partition("callback ")[2].partition(" a list")[0] for note in told) == [
        *("Remembers[0].updates", "Remembers[1].updates")
    ]
