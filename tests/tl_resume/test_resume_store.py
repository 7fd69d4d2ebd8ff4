"""Where the check keeps the tensors of captured states: small ones in memory, big ones in files, equal ones once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from tl_resume._check._store import Store

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor(float("nan")),
        torch.tensor([-0.0, 0.0]),
        torch.zeros(0, 5),
        torch.tensor(True),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(512, 513),
        torch.randn(1024, 257).t(),
        torch.nn.Parameter(torch.randn(514, 513)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_kept_tensor_comes_back_bit_for_bit(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Values, dtype and shape are those of the tensor when it was kept, whatever becomes of it afterwards."""
    expected = tensor.detach().clone()
    load, digest = Store(tmp_path).keep(tensor)
    if tensor.numel():
        tensor.detach().zero_()
    back = load()
    assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
    as_bytes = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (back, expected)]
    assert torch.equal(*as_bytes)
    assert len(digest) == 16


def test_tensors_of_a_megabyte_go_to_files(tmp_path: Path) -> None:
    """From 1 MB on a tensor lies in a file of the folder, below that in memory."""
    store = Store(tmp_path)
    store.keep(torch.ones(MEGABYTE // 4 - 1))
    assert list(tmp_path.iterdir()) == []
    store.keep(torch.ones(MEGABYTE // 4))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [MEGABYTE]


def test_equal_tensors_are_kept_once(tmp_path: Path) -> None:
    """A second tensor with the same content gives what the first one gave; another content, dtype or shape does not."""
    store = Store(tmp_path)
    first = torch.ones(512, 512)
    kept = [store.keep(tensor) for tensor in (first, first.clone(), first.t().contiguous().t())]
    assert len({id(load) for load, _ in kept}) == 1
    assert len(list(tmp_path.iterdir())) == 1
    others = [first * 2, first.view(torch.int32), first.view(256, 1024)]
    assert len({digest for _, digest in map(store.keep, [first, *others])}) == 4
    assert len(list(tmp_path.iterdir())) == 4


def test_a_mark_keeps_nothing(tmp_path: Path) -> None:
    """Only the digest is taken, the same that keeping gives."""
    store = Store(tmp_path)
    tensor = torch.ones(512, 512)
    load, digest = store.mark(tensor)
    assert load is None
    assert list(tmp_path.iterdir()) == []
    assert digest == store.keep(tensor)[1]


def test_what_is_given_back_is_a_copy(tmp_path: Path) -> None:
    """Changing a tensor that was given back does not change what is given back next."""
    store = Store(tmp_path)
    for tensor in (torch.ones(3), torch.ones(512, 512)):
        load, _ = store.keep(tensor)
        load().zero_()
        assert bool((load() == 1).all())


def test_what_was_kept_can_go_to_another_process(tmp_path: Path) -> None:
    """The functions that give tensors back can be pickled."""
    store = Store(tmp_path)
    for tensor in (torch.ones(3), torch.ones(512, 512)):
        load, _ = store.keep(tensor)
        assert torch.equal(pickle.loads(pickle.dumps(load))(), tensor)
