"""make_hf_trainer: a Trainer for tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback

from tl_hf import make_hf_trainer


def test_it_trains_a_few_steps_in_silence(hf, capfd):
    """8 updates by default, without a line of output and without a file that stays."""
    trainer = make_hf_trainer(hf.llama(), hf.tokens())
    folder = Path(trainer.args.output_dir)
    assert trainer.train().global_step == 8
    assert list(folder.iterdir()) == []
    assert (trainer.args.device.type, trainer.args.seed, trainer.args.learning_rate) == ("cpu", 0, 5e-5)
    del trainer
    gc.collect()
    assert not folder.exists()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize(
    ("given", "updates"),
    [
        ({"max_steps": 3}, 3),
        ({"num_train_epochs": 1}, 5),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 2}, 3),
    ],
)
def test_the_number_of_updates_may_be_given(hf, given, updates):
    """Either max_steps or num_train_epochs decides."""
    trainer = make_hf_trainer(hf.llama(), hf.tokens(), per_device_train_batch_size=8, **given)
    assert trainer.train().global_step == updates


def test_checkpoints_go_where_they_are_told(hf, tmp_path):
    """An output_dir of one's own stays, with what was asked for."""
    trainer = make_hf_trainer(hf.llama(), hf.tokens(), output_dir=tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]
    del trainer
    gc.collect()
    assert tmp_path.exists()


def test_arguments_go_to_the_trainer_or_to_its_arguments(hf):
    """Names decide: of TrainingArguments, of the Trainer, of a derived class."""

    class Weighted(Trainer):
        def __init__(self, *args, class_weights, **kwargs):
            super().__init__(*args, **kwargs)
            self.class_weights = class_weights

    class Listens(TrainerCallback):
        pass

    trainer = make_hf_trainer(
        hf.bert(),
        hf.classes(),
        hf.classes(8),
        trainer_class=Weighted,
        class_weights=[1.0, 2.0],
        weight_decay=0.1,
        callbacks=[Listens()],
        compute_metrics=lambda prediction: {"seen": float(len(prediction.predictions))},
        seed=3,
    )
    assert (trainer.class_weights, trainer.args.weight_decay, trainer.args.seed) == ([1.0, 2.0], 0.1, 3)
    assert any(type(callback) is Listens for callback in trainer.callback_handler.callbacks)
    assert trainer.evaluate()["eval_seen"] == 8.0


def test_a_class_that_takes_any_keyword_gets_what_is_unknown(hf):
    """`kwargs.pop("alpha")` shows in no signature."""

    class Pops(Trainer):
        def __init__(self, *args, **kwargs):
            self.alpha = kwargs.pop("alpha")
            super().__init__(*args, **kwargs)

    trainer = make_hf_trainer(hf.llama(), hf.tokens(), trainer_class=Pops, alpha=0.5, max_steps=2)
    assert (trainer.alpha, trainer.args.max_steps) == (0.5, 2)


def test_a_model_may_be_built_by_the_trainer(hf):
    """model_init takes the model's place."""
    assert make_hf_trainer(None, hf.tokens(), model_init=lambda: hf.llama(), max_steps=2).train().global_step == 2


def test_datasets_are_taken_as_they_are(hf):
    """What is no dict of tensors is handed on; evaluation data may be several datasets by name."""
    data = [dict(zip(("input_ids", "labels"), row, strict=True)) for row in zip(*hf.tokens().values(), strict=True)]
    trainer = make_hf_trainer(hf.llama(), data, {"short": hf.tokens(4), "long": data})
    assert trainer.train_dataset is data
    assert trainer.eval_dataset["long"] is data
    assert len(trainer.eval_dataset["short"]) == 4


def error_of(**changed):
    given = {"model": torch.nn.Linear(1, 1), "train_dataset": {"x": torch.ones(4, 1)}, **changed}
    with pytest.raises((TypeError, ValueError)) as caught:
        make_hf_trainer(**given)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "TypeError: model must be a torch.nn.Module, or None with model_init=..., got a NoneType"),
        (
            {"model": torch.nn.Linear},
            "TypeError: model must be a torch.nn.Module, or None with model_init=..., got the class Linear",
        ),
        ({"train_dataset": None}, "TypeError: train_dataset must be a dataset or a dict of tensors, got None"),
        (
            {"train_dataset": {"x": [1, 2], "y": torch.ones(2)}},
            "TypeError: train_dataset must be a dataset or a dict of tensors, got a dict of 'x': list, 'y': Tensor",
        ),
        (
            {"train_dataset": {}},
            "TypeError: train_dataset must be a dataset or a dict of tensors, got a dict of nothing",
        ),
        (
            {"train_dataset": {"x": torch.ones(4, 2), "y": torch.ones(3)}},
            "ValueError: the tensors of train_dataset must have one row an example, got shapes 'x': (4, 2), 'y': (3,)",
        ),
        (
            {"eval_dataset": {"a": {"x": torch.ones(4), "y": torch.tensor(1)}}},
            "ValueError: the tensors of eval_dataset['a'] must have one row an example, got shapes 'x': (4,), 'y': ()",
        ),
        (
            {"trainer_class": TensorDataset},
            "TypeError: trainer_class must be Trainer or a class derived from it, got TensorDataset",
        ),
        (
            {"trainer_class": "Trainer"},
            "TypeError: trainer_class must be Trainer or a class derived from it, got a str",
        ),
        (
            {"learning_rat": 1},
            "TypeError: learning_rat is no argument of TrainingArguments, nor of Trainer; did you mean learning_rate?",
        ),
        ({"qqq": 1}, "TypeError: qqq is no argument of TrainingArguments, nor of Trainer"),
        (
            {"args": None},
            "TypeError: args is made here: pass the arguments of TrainingArguments themselves (learning_rate=...)",
        ),
        (
            {"use_cpu": True},
            'TypeError: use_cpu follows from device: pass device="cpu", or the name of an accelerator',
        ),
        ({"device": "gpu"}, "ValueError: device must be a device of torch, such as 'cpu' or 'cuda', got 'gpu'"),
    ],
)
def test_misuse_is_named(changed, message):
    """Each mistake with the argument, what was got and what is allowed."""
    assert error_of(**changed) == message


def test_a_device_that_is_not_there_is_named(monkeypatch):
    """What a Trainer can use is told: the CPU, and the accelerator that it chooses by itself, its first device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert error_of(device="cuda") == "ValueError: device 'cuda' is not available here: a Trainer can use 'cpu'"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert error_of(device="mps") == "ValueError: device 'mps' is not available here: a Trainer can use 'cpu' or 'cuda'"
    assert error_of(device="cuda:1") == (
        "ValueError: device must be 'cpu' or 'cuda', got 'cuda:1': a Trainer uses the first cuda device that the "
        "process sees (CUDA_VISIBLE_DEVICES chooses which one that is)"
    )


def test_a_failed_call_leaves_no_folder(tmp_path, monkeypatch):
    """The temporary folder is removed where the Trainer cannot be made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="max_steps"):
        make_hf_trainer(torch.nn.Linear(1, 1), iter([]), max_steps=-1, num_train_epochs=1)
    assert list(tmp_path.iterdir()) == []
