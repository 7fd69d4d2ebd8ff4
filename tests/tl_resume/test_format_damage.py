"""A damaged or foreign file is noticed, and the error names it."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tl_resume import StateFileError
from tl_resume._format import StateFile, write_state
from tl_resume._format._header import header_digest, parse_header

STATE = {
    "w": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.float16),
    "t": torch.arange(4.0).view(2, 2).t(),
    "view": [view := torch.arange(5.0), view[1:3]],
    "n": [1, 2.5, "text", None, {"a": (1, b"x")}],
    "array": np.arange(3),
}


def _written(path: Path) -> bytes:
    write_state(path, STATE, durable=False)
    return path.read_bytes()


def _error(path: Path) -> str:
    with pytest.raises(StateFileError) as caught, StateFile(path) as file:
        file.state()
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(f"{path} ")


def _is_noticed(path: Path) -> bool:
    try:
        with StateFile(path) as file:
            return bool(file.damaged())
    except StateFileError as error:
        return str(error).startswith(str(path))


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_bit_anywhere_is_noticed(mask, tmp_path):
    """Every single byte of the file is covered by a digest, or by a check."""
    path = tmp_path / "state"
    data = bytearray(_written(path))
    assert not _is_noticed(path)
    unnoticed = []
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(data)):
            os.pwrite(file.fileno(), bytes([data[position] ^ mask]), position)
            if not _is_noticed(path):
                unnoticed.append(position)
            os.pwrite(file.fileno(), bytes([data[position]]), position)
    assert unnoticed == []


def test_a_file_of_any_other_length_is_noticed(tmp_path):
    """A file cut anywhere, or with bytes behind its end, is no state file."""
    path = tmp_path / "state"
    data = _written(path)
    unnoticed = []
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        if not _is_noticed(path):
            unnoticed.append(length)
    assert unnoticed == []
    path.write_bytes(data + b"x")
    assert _error(path) == "is damaged: it holds 91 bytes of tensors, its header lists 90"


def test_a_tensor_is_read_with_its_digest(tmp_path):
    """A flipped bit of a tensor is an error when it is read, unless that is not wanted."""
    path = tmp_path / "state"
    data = bytearray(_written(path))
    data[-1] ^= 1
    path.write_bytes(data)
    with StateFile(path) as file:
        assert file.damaged() == ["half"]
        with pytest.raises(StateFileError) as caught:
            file.read("half")
        assert str(caught.value) == f"{path} is damaged: the bytes of 'half' are not those that were written"
        file.read("half", verify=False)
        file.read("w")


def _forge(path: Path, change: Any) -> None:
    """Write a header that was changed on purpose: its digest is right."""
    data = _written(path)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    meta = json.loads(header["__metadata__"]["tl-resume"])
    change(header, meta)
    meta = {"version": meta.pop("version"), "header": "0" * 32, **{k: v for k, v in meta.items() if k != "header"}}
    header["__metadata__"] = {"tl-resume": json.dumps(meta, separators=(",", ":"))}
    text = json.dumps(header, separators=(",", ":")).encode()
    start = text.index(b"0" * 32)
    text = text[:start] + header_digest(text).encode() + text[start + 32 :]
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _set(*keys: Any) -> Any:
    *path, last, value = keys

    def change(header: Any, meta: Any) -> None:
        node = {"header": header, "meta": meta}
        for key in path:
            node = node[key]
        node[last] = value

    return change


_FORGED = {
    "huge shape": (
        _set("header", "w", "shape", [99999999999, 0]),
        "the tensor 'w' has 24 bytes, not those of its shape (99999999999, 0)",
    ),
    "negative size": (_set("header", "w", "shape", [-2, -3]), "the tensor 'w' has the shape [-2, -3]"),
    "bool size": (_set("header", "w", "shape", [True, 6]), "the tensor 'w' has the shape [True, 6]"),
    "float size": (_set("header", "w", "shape", [2.0, 3]), "the tensor 'w' has the shape [2.0, 3]"),
    "overlap": (
        _set("header", "w", "data_offsets", [0, 24]),
        "the tensor 'w' lies at 0 to 24, where 24 was to be its beginning",
    ),
    "three offsets": (_set("header", "w", "data_offsets", [24, 48, 50]), "the tensor 'w' has 3 offsets, not 2"),
    "unknown dtype": (
        _set("header", "w", "dtype", "F7"),
        "the tensor 'w' has the dtype 'F7', which this version of torch does not have",
    ),
    "other keys": (_set("header", "w", "more", 1), "the tensor 'w' is not described by dtype, shape and data_offsets"),
    "digests": (_set("meta", "digests", "00"), "its digests do not fit its 5 tensors"),
    "no digest": (_set("meta", "digests", "g" * 160), "the tensor 'array' has no digest"),
    "metadata keys": (
        _set("meta", "more", 1),
        "its metadata has the keys ['digests', 'header', 'more', 'state', 'tensors', 'version', 'views']",
    ),
    "strides": (
        _set("meta", "tensors", "t", {"strides": [1, 3]}),
        "the tensor 't' has strides (1, 3), which do not fit its shape (2, 2)",
    ),
    "special of none": (_set("meta", "tensors", "x", {}), "it describes a tensor 'x' that it does not hold"),
    "special property": (_set("meta", "tensors", "t", {"x": 1}), "the tensor 't' has an unknown property"),
    "special dtype": (_set("meta", "tensors", "t", {"dtype": "float64"}), "the tensor 't' cannot be read as 'float64'"),
    "view offset": (
        _set("meta", "views", 0, "offset", 16),
        "view 0 does not lie within the tensor 'view.0'",
    ),
    "view stride": (_set("meta", "views", 0, "strides", [10**15]), "view 0 does not lie within the tensor 'view.0'"),
    "view shape": (_set("meta", "views", 0, "shape", [2**70]), "view 0 has the shape [1180591620717411303424]"),
    "view of none": (_set("meta", "views", 0, "tensor", "x"), "view 0 is one of 'x' as 'float32'"),
    "views": (_set("meta", "views", {}), "its views are not a list"),
    "unknown tensor": (
        _set("meta", "state", "w", {"$tensor": "x"}),
        "its state names a tensor 'x' that it does not hold",
    ),
    "unknown view": (_set("meta", "state", "w", {"$view": 7}), "its state names a view 7 that it does not describe"),
    "unused tensor": (_set("meta", "state", "w", 0), "nothing of its state is the tensor 'w'"),
    "unknown type": (_set("meta", "state", "n", {"$code": "x"}), "its state has the unknown type '$code'"),
    "two types": (_set("meta", "state", "n", {"$int": "1", "x": 2}), "an object of its state has more than one type"),
    "bad int": (
        _set("meta", "state", "n", {"$int": "zz"}),
        "its state cannot be rebuilt (invalid literal for int() with base 16: 'zz')",
    ),
    "infinite": (_set("meta", "state", "n", float("inf")), "a number of its state is out of range"),
    "a key twice": (
        _set("meta", "state", "n", {"$dict": [[1, 1], [True, 2]]}),
        "a mapping of its state has a key twice",
    ),
    "a list as key": (
        _set("meta", "state", "n", {"$dict": [[[], 1]]}),
        "its state cannot be rebuilt (unhashable type: 'list')",
    ),
    "array dtype": (
        _set("meta", "state", "array", "$numpy_array", "dtype", "O8"),
        "an array of its state has the dtype 'O8'",
    ),
    "array shape": (
        _set("meta", "state", "array", "$numpy_array", "shape", [10**12]),
        "the array 'array' of its state does not fit its bytes",
    ),
    "array twice": (
        lambda header, meta: meta["state"].update(n=meta["state"]["array"]),
        "its state uses the bytes of 'array' for two things",
    ),
}


@pytest.mark.parametrize(("change", "message"), _FORGED.values(), ids=_FORGED)
def test_a_header_that_was_made_to_deceive_is_refused(change, message, tmp_path):
    """Nothing of a header is believed, even when its digest is right, and nothing large is made of it."""
    path = tmp_path / "state"
    _forge(path, change)
    assert _error(path) == f"is damaged: {message}"


def test_a_newer_version_says_so(tmp_path):
    """A version that this one does not know is no damage."""
    path = tmp_path / "state"
    _forge(path, _set("meta", "version", 2))
    assert _error(path) == "was written by a newer version: its format is 2, this one reads up to 1"


def _with_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "is damaged: its header is not a JSON object"),
        (b'{"a":1,"a":2}', "is damaged: the header has the key 'a' twice"),
        (
            b"\xff{}",
            "is damaged: the header is not JSON "
            "('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        ),
        (b"[" * 100_000, "is damaged: the header is nested too deeply"),
        (b'{"__metadata__":{"tl-resume":"[]"}}', "is damaged: its metadata is not a JSON object"),
        (b'{"__metadata__":{"tl-resume":"{\\"version\\":0}"}}', "is damaged: its format version is 0"),
        (
            b"{}",
            "is not a training state of tl-resume: its header has no 'tl-resume' metadata "
            "(tl-resume diff and tl-resume show read other safetensors files too)",
        ),
    ],
    ids=["list", "duplicate", "utf-8", "deep", "metadata", "version", "foreign"],
)
def test_a_broken_header_is_refused(header, message, tmp_path):
    """What is no header of ours is told from what is none at all."""
    path = tmp_path / "state"
    _with_header(path, header)
    assert _error(path) == message


def test_a_huge_number_is_refused(tmp_path):
    """Numbers with more digits than python reads end in the same error."""
    path = tmp_path / "state"
    _with_header(path, b'{"a":' + b"9" * 10_000 + b"}")
    assert re.fullmatch(r"is damaged: the header is not JSON \(Exceeds the limit .*\)", _error(path))


def test_other_files_are_refused(tmp_path):
    """A safetensors file of somebody else, an empty file, a folder, a pipe: each is named for what it is."""
    path = tmp_path / "other"
    save_file({"a": torch.ones(2)}, path)
    assert _error(path).startswith("is not a training state of tl-resume: ")
    path.write_bytes(b"")
    assert _error(path) == "is no safetensors file: it has only 0 bytes"
    path.write_bytes(b"PK\x03\x04 not a safetensors file")
    assert _error(path) == (
        "is damaged, or no safetensors file: its header would have 8390045714599856976 bytes, and the file has 27"
    )
    assert _error(tmp_path) == "is a folder, not a file"
    os.mkfifo(tmp_path / "pipe")
    assert _error(tmp_path / "pipe") == "is a device, pipe or socket, not a regular file"
    assert _error(Path("/dev/null")) == "is a device, pipe or socket, not a regular file"
    with pytest.raises(FileNotFoundError):
        StateFile(tmp_path / "missing")


def test_the_digest_of_a_forged_header_is_what_keeps_it_out(tmp_path):
    """Without its digest the forged headers of these tests would not be looked at."""
    path = tmp_path / "state"
    data = bytearray(_written(path))
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'\\"text\\"', b'\\"tent\\"')
    with pytest.raises(StateFileError) as caught:
        parse_header(bytes(header), len(data) - 8 - length, path)
    assert str(caught.value) == (f"{path} is damaged: its header is not the one that was written (its digest differs)")


def test_a_state_that_is_nested_too_deeply_is_refused_in_a_file(tmp_path):
    """Depth is limited on reading as on writing, whatever python's own limit is."""
    path = tmp_path / "state"
    nested: Any = 1
    for _ in range(150):
        nested = [nested]
    _forge(path, _set("meta", "state", "n", nested))
    assert _error(path) == "is damaged: its state is nested more than 100 deep"
