from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from safetensors.torch import save_file

from tl_resume import StateFileError, diff_states
from tl_resume._diff import _stored
from tl_resume._format import StateFile, write_state


def header(content, *, data=b""):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", ": neither a safetensors file nor one of torch.save"),
        (b"", ": neither a safetensors file nor one of torch.save"),
        (
            (10**6).to_bytes(8, "little") + b"{}",
            ": not a safetensors file, or cut off: its header claims 1,000,000 bytes",
        ),
        (
            header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, data=b"1234"),
            ": 'w' claims shape [2] of F32 in 4 bytes",
        ),
        (
            header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, data=b"12"),
            ": the bytes of 'w' do not lie where they must",
        ),
        (
            header({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, data=b"12"),
            ": 1 bytes behind the last tensor",
        ),
        (
            header({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
            ": the header's entry of 'w' is malformed",
        ),
        (header(b'{"w": {}, "w": {}}'), ": its header is not valid JSON (a key stands in it twice)"),
        (
            header(b'{"w": 1'),
            ": its header is not valid JSON (Expecting ',' delimiter: line 1 column 8 (char 7))",
        ),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, content, message):
    """Every fault of a foreign file is an error that names the file."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(StateFileError) as caught:
        diff_states(path, {})
    assert str(caught.value) == f"{path}{message}"


def damage(path, name, *, at=3):
    """Flip a bit of a stored tensor."""
    content = bytearray(path.read_bytes())
    with StateFile(path) as file:
        content[file._begin(file.tensors[name]) + at] ^= 0x40
    path.write_bytes(content)


def test_damage_is_told_from_a_difference(tmp_path, monkeypatch):
    """A tensor that differs since its bytes are not those that were written says so; others do not."""
    monkeypatch.chdir(tmp_path)
    state = {"model": {"w": torch.zeros(3), "v": torch.zeros(2)}}
    write_state("a", state)
    write_state("b", {"model": {"w": torch.zeros(3), "v": torch.ones(2)}})
    damage(tmp_path / "b", "model.w")
    diff = diff_states("a", "b")
    assert str(diff) == dedent("""\
        different: 2 of 2 tensors
          a: a
          b: b
          note: the bytes of 'model.w' in b are not those that were written

        model
          elements  largest  relative  tensor
            1 of 3        2         1  w
                                         [0]: 0 -> 2
                                         damaged in b
            2 of 2        1         1  v
                                         [0]: 0 -> 1""")
    assert [difference.as_dict()["damaged"] for difference in diff.differences] == [["b"], []]
    assert [difference.damaged for difference in diff_states("b", state).differences] == [("a",), ()]
    assert diff_states("a", state).notes == ()


def test_damage_of_many_tensors(tmp_path):
    """One note for each of the first five damaged tensors, whose views count once, and one for the rest."""
    tensors = {f"w{index}": torch.zeros(2) for index in range(7)}
    write_state(tmp_path / "a", {**tensors, "view": tensors["w0"][:1], "whole": {"dtype": torch.zeros(2)}})
    write_state(tmp_path / "b", {**tensors, "view": tensors["w0"][:1], "whole": {"dtype": torch.zeros(2).half()}})
    for name in (*tensors, "whole.dtype"):
        damage(tmp_path / "a", name)
    diff = diff_states(tmp_path / "a", tmp_path / "b")
    assert [difference.damaged for difference in diff.differences] == [("a",)] * 9
    assert diff.notes == (
        *(f"the bytes of 'w{i}' in {tmp_path / 'a'} are not those that were written" for i in range(5)),
        "3 more tensors are damaged: tl-resume verify names all",
    )
    assert str(diff).count("damaged in a") == 2  # all of one kind in a row: values, and the one of another dtype


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    """A file cut off during the comparison is an error, not a hang."""
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    listed = _stored.stored_tensors

    def then_cut(*arguments):
        tensors = listed(*arguments)
        os.truncate(path, 200)
        return tensors

    monkeypatch.setattr("tl_resume._diff._sources.stored_tensors", then_cut)
    with pytest.raises(StateFileError) as caught:
        diff_states(path, {"w": torch.zeros(100)})
    assert str(caught.value) == f"{path}: ended while it was read; is it being written?"


def test_missing_files_are_os_errors(tmp_path):
    """A file that is not there."""
    with pytest.raises(FileNotFoundError):
        diff_states(tmp_path / "nothing", {})


_MEMORY = """
import resource, sys, torch
from tl_resume import diff_states
from tl_resume._diff import _tensors
diff_states({}, {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for other, different in ((sys.argv[1], 0), (sys.argv[2], 1)):
    assert len(diff_states(sys.argv[1], other).differences) == different
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Files of one 64 MB tensor each are compared in a fraction of that, equal or not."""
    tensor = torch.arange(16_000_000, dtype=torch.float32)
    for name in ("a", "b"):
        save_file({"w": tensor}, tmp_path / name)
        tensor += 1
    command = [sys.executable, "-c", _MEMORY, tmp_path / "a", tmp_path / "b"]
    grown = [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    assert len(grown) == 2
    assert max(grown) < 40e6
