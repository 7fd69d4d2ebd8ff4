"""Where the trainings of a check write: never in the person's own output_dir."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tl_hf import check_hf_accumulation_equivalent, check_hf_resume_equivalent

SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """An output_dir with a training's real checkpoints: one of the steps that a check saves at, and later ones."""
    for number in (2, 4, 500, 1000):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_text("precious")
        os.utime(folder, (1e9 + number, 1e9 + number))
    return tmp_path


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_resume_check_leaves_real_checkpoints_alone(hf, real):
    """None is rotated away by save_total_limit, and none is overwritten."""
    before = content(real)
    assert check_hf_resume_equivalent(lambda: hf.trainer(output_dir=real, **SAVED)).ok
    assert content(real) == before


def test_the_accumulation_check_leaves_real_checkpoints_alone(hf, real):
    """What the Trainer saves on its way goes elsewhere too."""
    before = content(real)

    def make_trainer(k: int) -> Trainer:
        return hf.trainer(output_dir=real, gradient_accumulation_steps=k, **{**SAVED, "save_steps": 1})

    assert check_hf_accumulation_equivalent(make_trainer).ok
    assert content(real) == before


@pytest.mark.parametrize("resume_at", [4, 5])
def test_the_best_checkpoint_is_where_the_trainer_state_says(hf, tmp_path, resume_at):
    """With one folder for all Trainers, checkpoints of its own, and the best one kept."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}

    def make_trainer() -> Trainer:
        return hf.trainer(output_dir=tmp_path, eval_dataset=hf.tokens(8), **SAVED, **best)

    assert check_hf_resume_equivalent(make_trainer, resume_at=resume_at).ok
    assert list(tmp_path.iterdir()) == []


class FileAverage(TrainerCallback):
    """An average of the weights in a file beside the checkpoint; ``place`` says where that is."""

    def place(self, args: TrainingArguments, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "average.pt"

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        fresh = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.average = torch.load(self.place(args, state)) if state.global_step else fresh

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.1)

    def on_save(self, args, state, control, **kwargs):
        torch.save(self.average, self.place(args, state))


class BesideAverage(FileAverage):
    def place(self, args, state):
        return Path(args.output_dir) / "average.pt"


class LastAverage(FileAverage):
    def place(self, args, state):
        return Path(get_last_checkpoint(args.output_dir)) / "average.pt"


@pytest.mark.parametrize("average", [FileAverage, BesideAverage, LastAverage])
@pytest.mark.parametrize("arguments", [{}, {"save_strategy": "steps", "save_steps": 3}], ids=["", "saves"])
def test_a_file_that_a_callback_writes_is_found(hf, tmp_path, average, arguments):
    """The check's own advice: write it in on_save(), read it in on_train_begin()."""
    report = check_hf_resume_equivalent(lambda: hf.trainer(callbacks=[average()], output_dir=tmp_path, **arguments))
    assert str(report) == "Resume equivalence: passed"


def test_a_path_of_ones_own_is_told(hf, tmp_path):
    """A callback that does not go by args.output_dir writes to a folder that nobody made."""

    class Fixed(FileAverage):
        def place(self, args, state):
            return tmp_path / f"checkpoint-{state.global_step}" / "average.pt"

    with pytest.raises(RuntimeError, match="Parent directory") as caught:
        check_hf_resume_equivalent(lambda: hf.trainer(callbacks=[Fixed()], output_dir=tmp_path))
    assert caught.value.__notes__ == [
        f"the check trains in a temporary folder instead of {tmp_path}: see args.output_dir",
        "raised in save() before step 4",
    ]


class Elsewhere(Trainer):
    def _save_checkpoint(self, model, trial):
        self.save_model(str(Path(self.args.output_dir) / "mine"))


def test_checkpoints_by_other_names(hf):
    """A Trainer that writes none that transformers finds cannot be resumed from one."""
    with pytest.raises(ValueError, match="there is no folder") as caught:
        check_hf_resume_equivalent(lambda: hf.trainer(trainer_class=Elsewhere))
    assert str(caught.value) == (
        "make_trainer()'s Trainer must write its checkpoints as transformers does: there is no folder checkpoint-4 in "
        "args.output_dir, with Elsewhere._save_checkpoint()"
    )


def test_arguments_are_put_back(hf, tmp_path, capsys):
    """Also where all Trainers share them: while a training runs they say its folder, then the person's again."""
    shared = hf.trainer(output_dir=tmp_path).args

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print("folder:", args.output_dir)

    def make_trainer() -> Trainer:
        assert shared.output_dir == str(tmp_path)
        return Trainer(hf.llama(), shared, train_dataset=hf.trainer().train_dataset, callbacks=[Looks()])

    assert check_hf_resume_equivalent(make_trainer).ok
    assert shared.output_dir == str(tmp_path)
    [seen] = {line.partition(" ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("folder:")}
    assert seen != str(tmp_path)
    assert not Path(seen).parent.exists()


def test_nothing_is_pushed(hf, monkeypatch):
    """A check's checkpoints are no business of the Hub's."""
    pushed: list[Any] = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(folder))

    def make_trainer() -> Trainer:
        trainer = hf.trainer()
        trainer.args.push_to_hub = True
        return trainer

    assert check_hf_resume_equivalent(make_trainer, steps=4).ok
    assert pushed == []
