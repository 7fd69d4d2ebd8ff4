from __future__ import annotations

import argparse
import copy
from collections import deque
from textwrap import dedent

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tl_resume import diff_states
from tl_resume._format import write_state


def text(block):
    return dedent(block).strip("\n")


class Creates:
    """An object whose pickle creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def checkpoint():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.encoder = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    model.head = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})


MESSY = {
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "complex": torch.randn(3, dtype=torch.complex128),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "dates": np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
    "big endian": np.arange(3, dtype=">i4"),
    "long bytes": bytes(range(256)) * 40,
    "bytes": b"ab",
    "sparse": torch.eye(3).to_sparse(),
    "expanded": torch.ones(1).expand(5),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "plain": {3: (1, 2.5), "none": None, "big": 2**80, "dtype": torch.float16, "size": torch.Size([2])},
}


PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # torch >= 2.8


def test_a_state_file_is_the_state_that_it_holds(tmp_path):
    """Every kind of leaf, shared memory included, is the same in memory and in a file of ours."""
    shared = torch.arange(20.0)
    state = {**MESSY, "whole": shared, "part": shared[4:8], "column": shared.view(4, 5)[:, 1], "tied": shared}
    write_state(tmp_path / "state.safetensors", state)
    diff = diff_states(tmp_path / "state.safetensors", state)
    assert (str(diff).splitlines()[0], diff.same) == ("same: 18 tensors, 6 plain values", True)


@pytest.mark.parametrize(
    "name", ["strided", "complex", "conjugate", "array", "fortran", "dates", "long bytes", "big endian"]
)
def test_a_change_of_any_leaf_shows_in_a_state_file(tmp_path, name):
    """The near miss of the above: one element of each kind of leaf changed."""
    changed = copy.deepcopy(MESSY)
    leaf = changed[name]
    if isinstance(leaf, bytes):
        changed[name] = leaf[:-1] + b"x"
    elif isinstance(leaf, np.ndarray):
        changed[name] = (leaf + 1).astype(leaf.dtype)
    else:
        changed[name] = leaf + torch.eye(*leaf.shape) if leaf.dim() == 2 else leaf + 1
    write_state(tmp_path / "state.safetensors", MESSY)
    (difference,) = diff_states(tmp_path / "state.safetensors", changed).differences
    assert (difference.section or difference.name, difference.kind) == (name, "value")


def test_tensors_of_a_deque_show(tmp_path):
    """Tensors of a queue, such as the last losses, are compared in a state file as in memory."""
    write_state(tmp_path / "a.safetensors", {"last": deque([torch.zeros(2), 1], maxlen=5)})
    assert diff_states(tmp_path / "a.safetensors", {"last": deque([torch.zeros(2), 1])}).same
    diff = diff_states(tmp_path / "a.safetensors", {"last": deque([torch.ones(2), 1])})
    assert [str(difference) for difference in diff.differences] == [
        "last[0]: 2 of 2 elements differ, by up to 1; [0]: 0 -> 1"
    ]


def test_a_changed_view_shows(tmp_path):
    """Views of shared memory are read from where they lie, also across rows."""
    shared = torch.arange(20.0)
    write_state(tmp_path / "a.safetensors", {"w": shared, "part": shared[4:8], "column": shared.view(4, 5)[:, 1]})
    other = {"w": shared.clone(), "part": shared[4:8] + 1, "column": shared.view(4, 5)[:, 1] * 2}
    found = [str(difference) for difference in diff_states(tmp_path / "a.safetensors", other).differences]
    assert found == [
        "part: 4 of 4 elements differ, by up to 1; [0]: 4 -> 5",
        "column: 4 of 4 elements differ, by up to 16; [3]: 16 -> 32",
    ]


def test_a_torch_file_against_ours(tmp_path):
    """The same checkpoint written by torch.save and by us is the same."""
    state = checkpoint()
    torch.save(state, tmp_path / "a.pt")
    write_state(tmp_path / "b.safetensors", state)
    assert diff_states(tmp_path / "a.pt", tmp_path / "b.safetensors").same
    assert diff_states(str(tmp_path / "a.pt"), state).same


def test_old_torch_files_are_read_whole(tmp_path):
    """The format before torch 1.6 cannot be mapped; that it costs memory is noted."""
    state = checkpoint()
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    diff = diff_states(tmp_path / "old.pt", state)
    assert diff.same
    assert diff.notes[0] == "old.pt is in the format of torch < 1.6, which is read into memory whole"


def test_foreign_safetensors(tmp_path):
    """A model's weights by another library, against a checkpoint that holds them: its model section is compared."""
    state = checkpoint()
    save_file(state["model"], tmp_path / "model.safetensors", metadata={"format": "pt"})
    state["model"]["head.bias"] = state["model"]["head.bias"] + 1
    torch.save({"model": state["model"]}, tmp_path / "b.pt")
    diff = diff_states(tmp_path / "model.safetensors", tmp_path / "b.pt")
    assert [difference.path for difference in diff.differences] == ["model: head.bias"]
    assert [str(entry) for entry in diff.only_in_a] == ["__metadata__: format ('pt')"]
    assert diff.only_in_b == ()


@pytest.mark.skipif(PACKED is None, reason="this torch has no numbers smaller than a byte")
@pytest.mark.parametrize("write", [save_file, lambda state, path: write_state(path, state)], ids=["foreign", "ours"])
def test_numbers_smaller_than_a_byte(tmp_path, write):
    """Torch does not compute with them: their bytes are compared."""
    for name, data in (("a", [1, 2]), ("b", [1, 3])):
        packed = torch.tensor(data, dtype=torch.uint8).view(PACKED)
        write({"w": packed}, tmp_path / name)
        assert diff_states(tmp_path / name, {"w": packed}).same
    (difference,) = diff_states(tmp_path / "a", tmp_path / "b").differences
    assert str(difference) == "w: 1 of 2 elements differ, by up to 1; [1]: 2 -> 3"


def test_unsafe_files_are_listed_and_nothing_is_executed(tmp_path):
    """A pickle that would create a file is refused with the reason, and creates none."""
    trap = tmp_path / "created"
    torch.save({"model": Creates(trap)}, tmp_path / "evil.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "good.pt")
    diff = diff_states(tmp_path / "evil.pt", tmp_path / "good.pt")
    assert not trap.exists()
    assert (diff.same, diff.judged, diff.differences, diff.only_in_b) == (False, False, (), ())
    assert str(diff) == text(f"""
        could not be judged: 1 file could not be read
          a: {tmp_path}/evil.pt
          b: {tmp_path}/good.pt

        not read
          {tmp_path}/evil.pt (in a)
            needs {open.__module__}.open to be unpickled, which the safe reader refuses
    """)


def test_the_trap_works(tmp_path):
    """The same pickle, loaded as it must not be, does create the file."""
    torch.save(Creates(tmp_path / "created"), tmp_path / "evil.pt")
    torch.load(tmp_path / "evil.pt", weights_only=False).close()
    assert (tmp_path / "created").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_refused_files_are_compared_by_their_bytes(tmp_path, zipped):
    """Two refused files are the same if they are so byte for byte, else different."""
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        torch.save(argparse.Namespace(x=value), tmp_path / name / "f.pt", _use_new_zipfile_serialization=zipped)
    same = diff_states(tmp_path / "a" / "f.pt", tmp_path / "b" / "f.pt")
    assert (same.same, str(same).splitlines()[0]) == (True, "same: 0 tensors, 0 plain values, 2 files byte for byte")
    diff = diff_states(tmp_path / "a" / "f.pt", tmp_path / "c" / "f.pt")
    assert [(item.kind, item.path) for item in diff.differences] == [("bytes", "state")]
    assert str(diff).splitlines()[4:6] == ["content", "  the bytes of the file differ, its content is not read"]
