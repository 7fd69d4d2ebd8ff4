"""Captures share the copies of what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import check_accumulation_equivalent
from tl_accum._copies import Copies


def kept_twice(tensor: Tensor, change: Any = None) -> tuple[tuple[Tensor, bytes], tuple[Tensor, bytes]]:
    """Keep a tensor in two captures in a row, with a change in between."""
    kept, found = Copies(), []
    for _ in range(2):
        kept.begin()
        load, digest = kept.keep(tensor)
        found.append((load(), digest))
        if change is not None:
            change(tensor)
    return found[0], found[1]


def test_a_tensor_that_stays_as_it_is_is_copied_once() -> None:
    """And its two captures are known to be alike by their digest."""
    tensor = torch.arange(3.0)
    (first, digest), (second, again) = kept_twice(tensor)
    assert first is second
    assert digest == again
    assert first.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "change",
    [lambda t: t.add_(1.0), lambda t: t.data.mul_(2.0), lambda t: t.numpy().__setitem__(0, 5.0)],
    ids=["in place", "through .data", "through numpy"],
)
def test_a_change_is_seen_however_it_is_made(change: Any) -> None:
    """By content, since not every change counts a version."""
    (first, digest), (second, again) = kept_twice(torch.arange(1.0, 4.0), change)
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert not torch.equal(first, second)
    assert digest != again


def test_numbers_that_are_not_numbers_are_copied_each_time() -> None:
    """NaN equals nothing; what is captured is right all the same."""
    (first, _), (second, _) = kept_twice(torch.tensor([float("nan"), 1.0]))
    assert (first.isnan().tolist(), second.isnan().tolist()) == ([True, False], [True, False])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int8])
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    """Also those that torch can do little with."""
    tensor = torch.tensor([0.0, 1.0]).to(dtype)
    (first, _), (second, _) = kept_twice(tensor)
    assert first is second
    assert first.dtype is dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_what_torch_cannot_compare_is_copied_each_time() -> None:
    """Half-precision complex numbers."""
    (first, _), (second, _) = kept_twice(torch.ones(2, dtype=torch.complex32))
    assert (first is second, first.dtype) == (False, torch.complex32)


def test_views_of_one_memory_are_told_apart() -> None:
    """By shape, strides and dtype."""
    kept = Copies()
    kept.begin()
    matrix = torch.arange(6.0).reshape(2, 3)
    views = [matrix, matrix.flatten(), matrix.view(torch.int32), matrix[:, :2]]
    held = [kept.keep(view)[0]() for view in views]
    assert all(torch.equal(copy, view) and copy.dtype is view.dtype for copy, view in zip(held, views, strict=True))


def test_only_the_last_capture_is_remembered() -> None:
    """What one capture did not hold is let go of."""
    kept, tensor = Copies(), torch.ones(2)
    kept.begin()
    first = kept.keep(tensor)[0]()
    kept.begin()
    kept.begin()
    assert kept.keep(tensor)[0]() is not first


DATASET = torch.ones(1000, 6)


def test_a_dataset_among_the_globals_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many captures a check makes."""
    copies = []
    clone = Tensor.clone

    def counting(tensor: Tensor, **options: Any) -> Tensor:
        copies.append(tensor.shape)
        return clone(tensor, **options)

    def build() -> Any:
        model = nn.Linear(6, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - DATASET[0, 0]).square().mean()

    monkeypatch.setattr(Tensor, "clone", counting)
    assert check_accumulation_equivalent(build, torch.randn(8, 6), loss_fn=loss_fn).ok
    assert copies.count(DATASET.shape) == 1
