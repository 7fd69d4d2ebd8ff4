"""The resume check on a Trainer: misuse, errors, and what it leaves behind."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy
import pytest
import torch
from accelerate.state import GradientState
from transformers import TrainerCallback

from tl_hf import check_hf_resume_equivalent
from tl_hf._garbage import short_collections


def streams() -> list[Any]:
    legacy = numpy.random.get_state()
    return [random.getstate(), legacy[1].tolist(), legacy[2], torch.get_rng_state().tolist()]


def test_nothing_is_left_behind(hf, tmp_path, monkeypatch):
    """Neither random numbers, nor checkpoints, nor loaders that seem to be iterated."""
    monkeypatch.chdir(tmp_path)
    before, loaders = streams(), GradientState().dataloader_references
    check_hf_resume_equivalent(lambda: hf.trainer(hf.llama(0.2), output_dir="here"), steps=4)
    assert streams() == before
    assert GradientState().dataloader_references == loaders
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]


def test_frozen_objects_of_somebody_elses_stay_frozen(hf):
    """The check freezes what is there while it runs, and undoes nobody's gc.freeze()."""
    with short_collections():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        check_hf_resume_equivalent(lambda: hf.trainer(), steps=2)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


class Breaks(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise ZeroDivisionError("broken")


def test_errors_pass_through_with_their_place(hf, monkeypatch):
    """What the person's code raises comes out as it is, with a note, and the training is over."""
    before = GradientState().dataloader_references
    with pytest.raises(ZeroDivisionError, match="broken") as caught:
        check_hf_resume_equivalent(lambda: hf.trainer(callbacks=[Breaks(3)]))
    assert caught.value.__notes__ == ["raised in step 2 of the uninterrupted run"]
    assert GradientState().dataloader_references == before


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def error_of(make_trainer: Any, **arguments: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        check_hf_resume_equivalent(make_trainer, **arguments)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_training_that_is_too_short(hf):
    """max_steps decides the schedule too, so that nobody but the person can raise it."""
    assert error_of(lambda: hf.trainer(max_steps=5)) == (
        "ValueError: steps must be at most the number of updates that make_trainer()'s Trainer makes, 5, got 8: raise "
        "max_steps or num_train_epochs"
    )
    assert error_of(lambda: hf.trainer(callbacks=[Stops()])) == (
        "ValueError: steps must be at most the number of updates that the training makes, got 8: it ended after 3, "
        "where a callback stopped it"
    )


def test_make_trainer_must_make_a_trainer(hf):
    """A Trainer, nothing else, by a function, fresh in every call."""
    trainer = hf.trainer()
    assert error_of(trainer) == (
        "TypeError: make_trainer must be a function that builds a fresh Trainer, got a Trainer: write "
        "make_trainer=lambda: Trainer(model=Model(), ...), with a new model in every call"
    )
    assert error_of(3) == "TypeError: make_trainer must be a function, make_trainer(), got a int"
    assert error_of(lambda: 3) == "TypeError: make_trainer() must return a transformers.Trainer, got a int"
    assert error_of(lambda k: trainer).startswith(
        "TypeError: make_trainer is called as make_trainer(), got <lambda>(k)"
    )
    model = hf.llama()
    assert error_of(lambda: hf.trainer(model)) == (
        "ValueError: make_trainer() returned a Trainer with the model of an earlier call: every training needs a fresh "
        "one, so build model and Trainer inside of make_trainer"
    )


def test_several_processes_are_refused(hf, monkeypatch):
    """The checkpoints of one process are no others' business."""
    trainer = hf.trainer()
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    assert error_of(lambda: trainer) == (
        "ValueError: the check runs trainings of its own in one process, and make_trainer() returned a Trainer of 2 "
        "processes: run it without torchrun or accelerate launch"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1}, "ValueError: steps must be at least 2, one before and one after the resume; got 1"),
        ({"resume_at": 8}, "ValueError: resume_at must be from 1 to steps - 1 = 7, got 8"),
    ],
)
def test_misuse_is_named(hf, arguments, message):
    """As in every resume check."""
    assert error_of(lambda: hf.trainer(), **arguments) == message


def test_without_tl_resume_the_error_says_what_to_install(hf, monkeypatch):
    """The check is an extra."""
    monkeypatch.setitem(__import__("sys").modules, "tl_resume", None)
    with pytest.raises(ImportError) as caught:
        check_hf_resume_equivalent(lambda: hf.trainer())
    assert str(caught.value) == 'this check needs tl-resume: pip install "tl-hf[resume]"'


def test_progress_bars_stay_as_they_were(hf, capfd):
    """Writing a checkpoint draws none while the check runs."""
    check_hf_resume_equivalent(lambda: hf.trainer(), steps=2)
    assert capfd.readouterr() == ("", "")
