"""Steps that have to know the whole group before its first micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tl_accum import check_accumulation_equivalent
from tl_core import TrainingSetup

LENGTHS = (12, 11, 9, 7, 5, 3, 2, 1)


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def batch_of(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 20, (8, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [batch_of(seed) for seed in range(3)]


def num_tokens(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


def entropy(setup: TrainingSetup, batch: dict[str, Tensor]) -> Tensor:
    logits = setup.model(batch["ids"]).flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


class TokenWeighted:
    """Divides by the tokens of the whole group, which `count` counts ahead."""

    def __init__(self, k: int, count: Callable[[list[dict[str, Tensor]]], int] = num_tokens) -> None:
        self.k, self.count, self.total, self.left = k, count, 0, 0

    def begin_group(self, setup: TrainingSetup, batches: list[dict[str, Tensor]]) -> None:
        self.total, self.left = self.count(batches), len(batches)

    def __call__(self, setup: TrainingSetup, batch: dict[str, Tensor]) -> Tensor:
        loss = entropy(setup, batch) / self.total
        loss.backward()
        self.left -= 1
        if not self.left:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss


def test_a_step_that_counts_the_tokens_of_its_group_passes() -> None:
    """Tokens that are counted ahead weigh the same in micro-batches as in the full batch, also in the last group."""
    assert str(check_accumulation_equivalent(make_setup, BATCHES, TokenWeighted)) == "Gradient accumulation: passed"
    report = check_accumulation_equivalent(make_setup, BATCHES, TokenWeighted, epoch_length=6)
    assert str(report) == "Gradient accumulation: passed"


def test_a_function_may_have_begin_group_as_an_attribute() -> None:
    """The step need not be an object of a class."""

    def make_step(k: int) -> Any:
        held = TokenWeighted(k)

        def step(setup: TrainingSetup, batch: dict[str, Tensor]) -> Tensor:
            return held(setup, batch)

        step.begin_group = held.begin_group  # type: ignore[attr-defined]
        return step

    assert str(check_accumulation_equivalent(make_setup, BATCHES, make_step)) == "Gradient accumulation: passed"


def test_a_step_that_counts_wrongly_is_found() -> None:
    """What is counted for each micro-batch alone is told, with the group of each announced as it is."""

    def first_only(batches: list[dict[str, Tensor]]) -> int:
        return num_tokens(batches[:1])

    report = check_accumulation_equivalent(make_setup, BATCHES, lambda k: TokenWeighted(k, first_only))
    assert list(map(str, report.findings)) == [
        "[wrong-loss-scale] cycle 1 of 2: the accumulated gradients are 2.17x the full batch's (norm 0.841 instead of "
        "0.387)\n"
        "  cause: undecided: the scale of the loss depends on the accumulation steps in another way than it should\n"
        "  fix: divide the loss by the number of micro-batches in the group"
    ]


def test_begin_group_comes_before_each_group_with_batches_of_its_own() -> None:
    """It is called once a group, in its step's index, with copies: what it does to them reaches no step."""
    heard: SimpleQueue[tuple[int, str, int]] = SimpleQueue()  # not set back between the runs, as a list would be

    class Listening(TokenWeighted):
        def begin_group(self, setup: TrainingSetup, batches: list[dict[str, Tensor]]) -> None:
            super().begin_group(setup, batches)
            heard.put((self.k, "group", setup.step_index))
            for batch in batches:
                batch["labels"].fill_(0)

        def __call__(self, setup: TrainingSetup, batch: dict[str, Tensor]) -> Tensor:
            heard.put((self.k, "step", setup.step_index))
            return super().__call__(setup, batch)

    assert check_accumulation_equivalent(make_setup, BATCHES, Listening, accumulation_steps=2).ok
    assert [heard.get() for _ in range(heard.qsize())] == [
        *[(1, "group", 0), (1, "step", 0), (1, "group", 1), (1, "step", 1)],
        *[(2, "group", 0), (2, "step", 0), (2, "step", 1), (2, "group", 2), (2, "step", 2), (2, "step", 3)],
    ]


def test_begin_group_must_be_a_function() -> None:
    """Something else of that name is misuse."""

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Any) -> None:
            raise NotImplementedError

        step.begin_group = 3  # type: ignore[attr-defined]
        return step

    with pytest.raises(TypeError) as caught:
        check_accumulation_equivalent(make_setup, BATCHES, make_step)
    assert str(caught.value) == (
        "begin_group of make_step(1)'s step must be a function begin_group(setup, batches), got a int"
    )


def test_what_begin_group_raises_passes_through_with_its_place() -> None:
    """The error is the person's, with a note of where it came from."""

    class Failing(TokenWeighted):
        def begin_group(self, setup: TrainingSetup, batches: list[dict[str, Tensor]]) -> None:
            raise KeyError("labels")

    with pytest.raises(KeyError) as caught:
        check_accumulation_equivalent(make_setup, BATCHES, Failing)
    assert caught.value.__notes__ == [
        "raised in begin_group() of cycle 1",
        "raised in the run over full batches",
    ]
