"""Which batches the accumulation check takes, and where their epoch ends."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from tl_hf import check_hf_accumulation_equivalent


class Streams(IterableDataset):
    """Examples of which nobody knows how many there are."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        self.data = data

    def __iter__(self):
        for row in range(len(self.data["labels"])):
            yield {name: tensor[row] for name, tensor in self.data.items()}


def check(hf: Any, train: Any, *, size: int = 32, data: Any = None, **arguments: Any) -> Any:
    """As many examples an update, whatever the accumulation steps."""

    def make_trainer(k: int) -> Trainer:
        return hf.trainer(
            data=train, per_device_train_batch_size=size // k, gradient_accumulation_steps=k, max_steps=8, **arguments
        )

    return check_hf_accumulation_equivalent(make_trainer, data)


def test_an_epoch_is_one_of_micro_batches(hf):
    """Two full batches of 32 are eight micro-batches of 8, and no group of the epoch is incomplete."""
    arguments = {"model": None, "model_init": hf.bert}
    assert str(check(hf, hf.classes(64), **arguments)).partition("\n\nWhat")[0] == (
        "Gradient accumulation: failed, 1 finding\n\n"
        "[loss-not-divided] cycle 1 of 2: the accumulated gradients are 4x the full batch's (norm 0.119 instead of "
        "0.0298)\n"
        "  cause: the loss is a mean over the micro-batch and is not divided by the 4 accumulation steps; the Trainer "
        "leaves that to the loss where the batch has labels, since BertForSequenceClassification.forward() takes any "
        "keyword, num_items_in_batch among them\n"
        "  fix: divide the sum of the losses by num_items_in_batch, the number of items in the whole group, which "
        "compute_loss() is given; or set loss_is_scaled_for_ga = False in the Trainer's class for a loss that is a mean"
    )


@pytest.mark.parametrize(("num_examples", "groups"), [(64, 2), (44, 3), (45, 3), (69, 4), (24, 2)])
def test_an_incomplete_last_group_is_that_of_the_micro_batches(hf, num_examples, groups):
    """Where there is one, its epoch and the first group of the next; a full batch that is too small to split is left.

    24 examples are a single batch, which is smaller than 32 and all that there is.
    """
    report = check(hf, hf.tokens(num_examples))
    assert (str(report), report.cycles) == ("Gradient accumulation: passed", groups)


def test_data_without_a_known_end_have_none(hf):
    """An iterable dataset has no length, and a loader of full batches says nothing of micro-batches."""
    report = check(hf, Streams(hf.tokens(44)))
    assert (str(report), report.cycles) == ("Gradient accumulation: passed", 2)
    loader = DataLoader(list(Streams(hf.tokens(48))), 16)
    report = check(hf, hf.tokens(44), data=loader)
    assert (str(report), report.cycles) == ("Gradient accumulation: passed", 2)
    assert report.data_form == "an iterable (DataLoader), iterated again when it ends"


def test_arguments_are_as_they_were(hf):
    """Those of one Trainer may be those of all."""
    made = []

    def make_trainer(k: int) -> Trainer:
        made.append(hf.trainer(data=hf.tokens(45), per_device_train_batch_size=32 // k, gradient_accumulation_steps=k))
        return made[-1]

    assert check_hf_accumulation_equivalent(make_trainer).ok
    assert [trainer.args.dataloader_drop_last for trainer in made] == [False] * len(made)


def test_the_same_batches_whatever_the_callers_generators(hf, capsys):
    """The seed decides which batches are drawn, and the caller's generators stay where they are."""
    ids = hf.tokens(64)["input_ids"].tolist()

    class Prints(Trainer):  # what it kept in a list would be put back
        def compute_loss(self, model, inputs, *args, **kwargs):
            print(*[ids.index(row) for row in inputs["input_ids"].tolist()])
            return super().compute_loss(model, inputs, *args, **kwargs)

    def states() -> list[str]:
        return [str(random.getstate()), str(numpy.random.get_state()), str(torch.get_rng_state().tolist())]

    drawn: list[list[str]] = []
    for seed in range(2):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        assert check(hf, hf.tokens(64), trainer_class=Prints).ok
        assert states() == before
        drawn.append(capsys.readouterr().out.splitlines())
    assert drawn[0] == drawn[1]
    first, second = (list(map(int, line.split())) for line in drawn[0][:2])
    assert sorted(first + second) == list(range(64)) != first + second
