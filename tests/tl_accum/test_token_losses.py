"""Losses over unequal numbers of tokens, wrong in two ways at once, or padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tl_accum import check_accumulation_equivalent
from tl_core import TrainingSetup

LENGTHS = (12, 11, 9, 7, 5, 3, 2, 1)
Loss = Callable[[TrainingSetup, Any, int], torch.Tensor]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def batch_of(seed: int) -> dict[str, Any]:
    ids = torch.randint(1, 20, (8, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = -100
    return {"ids": ids, "labels": labels, "total": int((labels != -100).sum())}


BATCHES = [batch_of(seed) for seed in range(2)]


def entropy(setup: TrainingSetup, batch: Any, reduction: str) -> torch.Tensor:
    logits = setup.model(batch["ids"]).flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction=reduction)


def penalty(setup: TrainingSetup) -> torch.Tensor:
    return 1e-2 * sum(parameter.square().sum() for parameter in setup.model.parameters())


def make_step(loss_of: Loss) -> Callable[[int], Callable[[TrainingSetup, Any], torch.Tensor]]:
    def make(k: int) -> Callable[[TrainingSetup, Any], torch.Tensor]:
        def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
            loss = loss_of(setup, batch, k)
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    return make


def found(loss_of: Loss, **options: Any) -> list[str]:
    return list(map(str, check_accumulation_equivalent(make_setup, BATCHES, make_step(loss_of), **options).findings))


def in_low_precision(setup: TrainingSetup, batch: Any, k: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return entropy(setup, batch, "mean")


@pytest.mark.parametrize("loss_of", [lambda setup, batch, k: entropy(setup, batch, "mean"), in_low_precision])
def test_means_of_tokens_that_are_not_divided_either(loss_of: Loss) -> None:
    """Both mistakes are in the one finding, also where bfloat16 makes other counts fit within tolerance."""
    assert found(loss_of) == [
        "[mean-of-means] cycle 1 of 2: each micro-batch weighs 1 in the accumulated gradients, and by its share in the "
        "full batch's: 23, 16, 8, 3 of 50 (batch['labels'] != -100); norm 2.12 instead of 0.387\n"
        "  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and "
        "these means are added up: what is in micro-batches with few of them weighs too much; nor are these means "
        "divided by the 4 accumulation steps\n  fix: sum the loss, and divide it by the total number of elements of "
        "the whole group, counted before the first "
        "micro-batch"
    ]


def test_a_penalty_in_each_part_of_a_sum() -> None:
    """A sum over the group divides nothing, so that only the term's own shape tells it."""
    assert found(lambda setup, batch, k: entropy(setup, batch, "sum") / batch["total"] + penalty(setup)) == [
        "[constant-term] cycle 1 of 2: the accumulated gradients hold 4 times a term that the full batch's hold once "
        "(norm 0.255, in all 3 parameters), so that the norm is 1.13 instead of 0.487\n"
        "  cause: a term of the loss that does not depend on the data (its gradient is 0.02 times the weights: an L2 "
        "penalty) is added to each micro-batch's part of the sum\n"
        "  fix: add the term in one micro-batch of the group, or divide it by k"
    ]


def test_a_penalty_once_a_group_and_a_sum_pass() -> None:
    """The near misses: the term divided by k, and no term at all."""
    assert found(lambda setup, batch, k: entropy(setup, batch, "sum") / batch["total"] + penalty(setup) / k) == []
    assert found(lambda setup, batch, k: entropy(setup, batch, "sum") / batch["total"]) == []


def trimmed(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    made = []
    for ids, labels in zip(batch["ids"].chunk(parts), batch["labels"].chunk(parts), strict=True):
        longest = int((labels != -100).sum(1).max())
        made.append({**batch, "ids": ids[:, :longest], "labels": labels[:, :longest]})
    return made


def test_a_mean_over_padding_too() -> None:
    """Micro-batches that are padded each by itself have fewer elements together than the full batch."""
    assert found(lambda s, b, k: entropy(s, b, "sum") / b["labels"].numel() / k, split=trimmed) == [
        "[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in "
        "the full batch's: 24, 18, 10, 4 of 96 (elements of batch['ids']); norm 0.417 instead of 0.201\n"
        "  cause: each micro-batch's loss is divided by elements of batch['ids'], which is 56 for all of them together "
        "and 96 for the full batch (padding counts)\n"
        "  fix: sum the loss, and divide it by the total number of elements of the whole group, counted before the "
        "first micro-batch"
    ]


def test_means_of_tokens_that_are_divided_by_too_much() -> None:
    """What they are divided by is told as it is: here by the workers too, which average gradients anyway."""
    (finding,) = found(lambda setup, batch, k: entropy(setup, batch, "mean") / (1 if k == 1 else 2 * k))
    assert "each micro-batch weighs 0.125 in the accumulated gradients" in finding
    assert "weighs too much; besides, they are divided by 8 instead of 4\n" in finding
