"""Large states go to the disk past the page cache, and the file is the same."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from tl_resume._format import StateFile, write_state
from tl_resume._format import _direct as direct_module
from tl_resume._format import _write as write_module


def _equal(read: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> bool:
    return list(read) == list(written) and all(torch.equal(read[name], written[name]) for name in written)


@pytest.mark.parametrize("size", [0, 1, 4096, 5 << 20])
def test_a_large_state_is_written_past_the_page_cache(size, monkeypatch, tmp_path):
    """The file is the same as one that is written through it, but for the padding of its header."""
    monkeypatch.setattr(write_module, "DIRECT_BYTES", 0)
    state = {"a": torch.randint(0, 255, (size,), dtype=torch.uint8), "b": torch.randn(4096).view(64, 64).t()}
    path = tmp_path / "state"
    write_state(path, state)
    with StateFile(path) as file:
        assert file.damaged() == []
        assert _equal(file.state(), state)
        assert file._data % 4096 == 0


@pytest.mark.parametrize("at", ["flag", "write"])
def test_a_file_system_without_direct_writing_is_written_through_the_cache(at, monkeypatch, tmp_path):
    """A refusal, early or late, makes no difference to the file."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(write_module, "DIRECT_BYTES", 0)
    real, refused = os.pwrite, []

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, position)

    def set_direct(descriptor: int, on: bool) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if at == "flag":
        monkeypatch.setattr(direct_module, "_set_direct", set_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    state = {"a": torch.arange(3 << 20)}
    write_state(tmp_path / "state", state)
    assert bool(refused) == (at == "write")
    with StateFile(tmp_path / "state") as file:
        assert file.damaged() == []
        assert _equal(file.state(), state)


def test_a_disk_that_is_full_later_leaves_nothing(monkeypatch, tmp_path):
    """An error of a thread that writes is the error of the call."""
    monkeypatch.setattr(write_module, "DIRECT_BYTES", 0)
    path = tmp_path / "state"
    write_state(path, {"a": 1})

    def full(descriptor: int, data: Any, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as caught:
        write_state(path, {"a": torch.arange(3 << 20)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    with StateFile(path) as file:
        assert file.state() == {"a": 1}
