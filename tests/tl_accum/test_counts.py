"""What could be counted in micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tl_accum._counts import Counts, candidates


def found(*parts: Any) -> dict[str, tuple[float, ...]]:
    # any batch of the same make will do as the full one here
    return {counts.what: counts.numbers for counts in candidates(parts, parts[-1])}


def test_tokens_that_are_not_ignored_are_counted() -> None:
    """The usual values for "ignore" come first, with and without a sequence's first position."""
    labels = [torch.tensor([[5, -100, -100], [5, 5, 7]]), torch.tensor([[5, 5, 5], [5, 5, 7]])]
    first, second, *_ = candidates([{"labels": part} for part in labels], {"labels": torch.cat(labels)})
    assert first == Counts("batch['labels'] != -100", (4.0, 6.0), 10.0)
    assert second == Counts("batch['labels'][:, 1:] != -100", (2.0, 4.0), 6.0)


def test_the_full_batch_is_counted_too() -> None:
    """Its padding makes its own count larger than the sum of the micro-batches'."""
    parts = [torch.zeros(1, 2) - 1.0, torch.zeros(1, 3) - 1.0]
    counts = {one.what: one for one in candidates(parts, torch.zeros(2, 3) - 1.0)}
    assert counts["elements of batch"] == Counts("elements of batch", (2.0, 3.0), 6.0)


def test_a_value_that_is_common_may_be_the_padding() -> None:
    """Padding is any number; a value that is nowhere is not tried."""
    ids = [torch.tensor([[50256, 50256, 3]]), torch.tensor([[2, 50256, 3]])]
    counts = found(*ids)
    assert counts["batch != 50256"] == (1.0, 2.0)
    assert not any("-100" in what for what in counts)


def test_masks_are_counted() -> None:
    """Bools by their truth, numbers by their sum."""
    masks = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    assert found(*masks) == {
        "batch is True": (1.0, 2.0),
        "batch is False": (2.0, 1.0),
    }
    counts = found(*[mask.float() for mask in masks])
    assert counts["the sum of batch"] == (1.0, 2.0)
    assert counts["batch > 0"] == (1.0, 2.0)


def test_weights_are_summed_in_double_precision() -> None:
    """A sum in half precision would be off by more than what is looked for."""
    weights = [torch.full((3000,), 0.1, dtype=torch.float16), torch.full((3000,), 0.2, dtype=torch.float16)]
    exact = tuple(float(weight[0]) * 3000 for weight in weights)
    assert found(*weights)["the sum of batch"] == pytest.approx(exact, rel=1e-6)


def test_examples_and_elements_are_counted() -> None:
    """Where micro-batches differ in size."""
    counts = found(torch.zeros(2, 3) - 1.0, torch.zeros(3, 3) - 1.0)
    assert counts == {"elements of batch": (6.0, 9.0), "examples in batch": (2.0, 3.0)}


def test_what_is_the_same_in_all_micro_batches_is_left_out() -> None:
    """It cannot tell anything."""
    assert found(torch.zeros(2, 3) - 1.0, torch.zeros(2, 3) - 1.0) == {}


@dataclasses.dataclass
class Batch:
    mask: Any
    rest: Any = None


def test_every_container_is_looked_into() -> None:
    """Dataclasses, tuples, arrays; names are those by which the step reaches them."""
    parts = [
        Batch((np.array([True, False]), [torch.tensor([1.0, 0.0])])),
        Batch((np.array([True, True]), [torch.tensor([1.0, 1.0])])),
    ]
    counts = found(*parts)
    assert counts["batch.mask[0] is True"] == (1.0, 2.0)
    assert counts["the sum of batch.mask[1][0]"] == (1.0, 2.0)


def test_lengths_of_what_examples_hold_are_counted() -> None:
    """Of lists of tensors, and of the same key of dicts; a key that one of them lacks, and numbers, have no length."""

    def targets(*lengths: int) -> list[dict[str, Any]]:
        held = [{"boxes": torch.zeros(length, 4) - 1.0, "id": torch.tensor(length)} for length in lengths]
        return [{**held[0], "extra": torch.zeros(lengths[0])}, *held[1:]]

    counts = found(targets(1, 2), targets(3, 2))
    assert {what: numbers for what, numbers in counts.items() if "len(" in what} == {
        "len(batch[i]['boxes']) != 1": (1.0, 2.0),
        "len(batch[i]['boxes']) != 3": (2.0, 1.0),
        "the sum of len(batch[i]['boxes'])": (3.0, 5.0),
    }
    counts = found([torch.zeros(1), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)])
    assert counts["the sum of len(batch[i])"] == (3.0, 4.0)
    assert found([], []) == {}


@pytest.mark.parametrize(
    "parts",
    [
        (torch.tensor(1.0), torch.tensor(2.0)),
        ("text", "more text"),
        (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([1.0, 2.0])),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        ({"a": torch.ones(2)}, {"b": torch.zeros(2)}),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    ],
    ids=["0-dim", "texts", "complex", "complex and real", "array of texts", "other keys", "sparse"],
)
def test_what_cannot_be_counted_is_left_out(parts: tuple[Any, ...]) -> None:
    """And raises nothing."""
    assert found(*parts) == {}


def test_negative_sums_are_left_out() -> None:
    """A number of things is no less than 0."""
    counts = found(torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 4.0]))
    assert counts == {}
