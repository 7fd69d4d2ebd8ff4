"""What is written is read back, bit for bit, and by the safetensors library too."""

from __future__ import annotations

import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tl_resume._format import StateFile, TensorEntry, write_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental", "ignore:Sparse CSR tensor support is in beta"
)


def roundtrip(state: Any, folder: pathlib.Path) -> Any:
    path = folder / "state.safetensors"
    write_state(path, state, durable=False)
    with StateFile(path) as file:
        assert file.damaged() == []
        file.skeleton()
        return file.state()


def assert_same(read: Any, written: Any) -> None:
    """Compare types, order, and every bit."""
    if isinstance(written, torch.Tensor):
        assert_same_tensor(read, written.detach())
        return
    assert type(read) is type(written)
    if isinstance(written, float):
        assert struct.pack(">d", read) == struct.pack(">d", written)
    elif isinstance(written, complex):
        assert_same([read.real, read.imag], [written.real, written.imag])
    elif isinstance(written, dict):
        assert len(read) == len(written)
        for (key, value), (other, expected) in zip(read.items(), written.items(), strict=True):
            assert_same(key, other)
            assert_same(value, expected)
        if isinstance(written, defaultdict):
            assert read.default_factory is written.default_factory
    elif isinstance(written, (list, tuple, deque)):
        assert len(read) == len(written)
        for value, expected in zip(read, written, strict=True):
            assert_same(value, expected)
        if isinstance(written, deque):
            assert read.maxlen == written.maxlen
    elif isinstance(written, slice):
        assert_same([read.start, read.stop, read.step], [written.start, written.stop, written.step])
    elif isinstance(written, (set, frozenset)):
        assert sorted(map(repr, read)) == sorted(map(repr, written))
    elif isinstance(written, (np.ndarray, np.generic)):
        assert (read.dtype.str, read.shape, read.tobytes()) == (written.dtype.str, written.shape, written.tobytes())
    else:
        assert read == written


def assert_same_tensor(read: torch.Tensor, written: torch.Tensor) -> None:
    written = written.resolve_conj().resolve_neg()
    assert (read.dtype, read.shape) == (written.dtype, written.shape)
    assert bytes_of(read) == bytes_of(written)


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().view(torch.uint8).numpy()) if tensor.dim() else bytes_of(tensor.reshape(1))


_floats = st.floats(allow_nan=True) | st.sampled_from([math.nan, -math.nan, -0.0, math.inf])
# every code point, single surrogates included, and two that would make one character
_text = st.text(st.characters(codec=None, exclude_categories=())) | st.just("\ud83d\ude00") | st.just("$dict")
_dtypes = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(_dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    turned = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return turned.expand(2, *turned.shape) if draw(st.booleans()) else turned


_arrays = st.builds(
    lambda code, values, order: np.array([values, values], order=order).astype(code),
    st.sampled_from(["<f4", ">f4", "<f8", "<i8", ">i2", "|b1", "<c16", "<f2", "<U3", "|S2", "<M8[s]", "<u2", "<f16"]),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from("CF"),
)
_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | _text | st.floats(allow_nan=False) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)
_leaves = (
    _keys
    | _floats
    | st.complex_numbers()
    | st.integers(-(10**60), 10**60)
    | st.builds(bytearray, st.binary(max_size=3))
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 9))
    | st.builds(slice, st.none() | st.integers(), st.integers(), st.none())
    | st.sampled_from(
        [torch.float8_e5m2, torch.device("cuda", 1), torch.strided, torch.channels_last, torch.Size([2, 0])]
    )
    | st.sampled_from(
        [pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path()]
    )
    | st.builds(lambda code, value: np.dtype(code).type(value), st.sampled_from("fdilBe?"), st.integers(0, 100))
    | _text.filter(lambda text: "\0" not in text).map(np.str_)
    | _tensors()
    | _arrays
)
_states = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.dictionaries(_text, inner, max_size=3)
        | st.dictionaries(_keys, inner, max_size=3).map(OrderedDict)
        | st.builds(
            defaultdict, st.sampled_from([None, list, int, float, dict, set]), st.dictionaries(_keys, inner, max_size=2)
        )
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
        | st.sets(_keys, max_size=3)
        | st.frozensets(_keys, max_size=3)
        | st.dictionaries(_keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(state=_states)
def test_any_nested_state_comes_back_bit_for_bit(state, tmp_path):
    """Types, order and bits of every leaf are those that were written."""
    assert_same(roundtrip(state, tmp_path), state)


def test_the_safetensors_library_reads_the_file(tmp_path):
    """Tensors have human names, and are equal when the safetensors library reads them."""
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "model": {"conv": {"weight": weight}, "scale": torch.tensor(2.5), "c": torch.tensor([1 + 2j])},
        "optimizer": {1: {"exp_avg": torch.randn(3, 5).t()}},
        "half": torch.randn(3).to(torch.float16),
        "__metadata__": torch.ones(2),
        "double": torch.tensor([1 + 2j], dtype=torch.complex128),
    }
    write_state(tmp_path / "state", state)
    with safe_open(tmp_path / "state", "pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert sorted(read) == [
        "__metadata__#2",
        "double",
        "half",
        "model.c",
        "model.conv.weight",
        "model.scale",
        "optimizer.1.exp_avg",
    ]
    assert torch.equal(read["model.conv.weight"], weight)
    assert torch.equal(read["optimizer.1.exp_avg"], state["optimizer"][1]["exp_avg"])
    assert torch.equal(read["model.c"], state["model"]["c"])
    assert read["double"].tolist() == [[1.0, 2.0]]


def test_strides_are_kept(tmp_path):
    """A dense layout comes back as it was; an expanded tensor is stored once; gaps are not stored."""
    state = {
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 5).t(),
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 100_000),
        "gaps": torch.randn(100, 100)[:, 0],
    }
    path = tmp_path / "state"
    write_state(path, state)
    assert path.stat().st_size < 4000
    with StateFile(path) as file:
        read = file.state()
    assert {name: tensor.stride() for name, tensor in read.items()} == {
        "channels_last": (48, 1, 12, 3),
        "turned": (1, 5),
        "expanded": (1, 0),
        "gaps": (1,),
    }
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor)


def test_shared_memory_is_stored_once_and_shared_again(tmp_path):
    """One object is one object again, and views of one memory are views of one memory."""
    weight = torch.nn.Parameter(torch.randn(50, 40))
    buffer = torch.arange(100.0)
    state = {
        "weight": weight,
        "tied": weight,
        "alias": weight.detach(),
        "column": weight[:, 3],
        "turned": weight.t(),
        "views": [buffer[0:60], buffer[40:80]],
        "apart": buffer[90:],
        "real": torch.view_as_real(c := torch.randn(3, dtype=torch.complex64)),
        "complex": c,
    }
    path = tmp_path / "state"
    write_state(path, state)
    with StateFile(path) as file:
        assert list(file.tensors) == ["weight", "views.0.storage", "apart", "real"]
        read = file.state()
        skeleton = file.skeleton()
        alone = file.read(skeleton["column"])
    assert_same({**state, "weight": weight.detach(), "tied": weight.detach()}, read)
    assert read["weight"] is read["tied"]
    assert read["alias"] is not read["weight"]
    read["weight"][:, 3] = 7
    assert set(read["column"].tolist()) == {7.0}
    assert torch.equal(read["alias"], read["turned"].t())
    read["views"][0][50] = -1
    assert read["views"][1][10] == -1
    read["complex"].zero_()
    assert not read["real"].any()
    assert torch.equal(alone, weight[:, 3])
    assert skeleton["tied"] == skeleton["weight"]
    assert (skeleton["column"].name, skeleton["column"].whole, skeleton["column"].offset) == ("weight", False, 12)


def test_conjugate_and_negative_views_are_resolved(tmp_path):
    """What a view shows is stored, not the memory that it shows otherwise."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag}
    read = roundtrip(state, tmp_path)
    assert read["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert read["neg"].tolist() == [-2.0, 4.0]
    assert not read["conj"].is_conj()


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_sparse_tensors_come_back_sparse(layout, tmp_path):
    """Sparse layouts are stored by their parts."""
    dense = torch.eye(4)
    dense[1, 3] = 2
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    read = roundtrip({"a": dense.to_sparse(layout=layout, **blocks)}, tmp_path)["a"]
    assert read.layout is layout
    assert torch.equal(read.to_dense(), dense)


def test_an_uncoalesced_sparse_tensor_stays_uncoalesced(tmp_path):
    """Gradients of an embedding repeat indices; they are not summed by saving them."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,), check_invariants=True)
    read = roundtrip([sparse], tmp_path)[0]
    assert (read._nnz(), read.is_coalesced()) == (2, False)


def test_a_skeleton_reads_no_tensor(tmp_path):
    """Entries stand for tensors, arrays and long bytes, and each can be read alone."""
    state = {"w": torch.arange(6.0).view(2, 3), "a": np.arange(3, dtype=">i4"), "b": b"x" * 5000, "n": 3}
    write_state(tmp_path / "state", state)
    with StateFile(tmp_path / "state") as file:
        skeleton = file.skeleton()
        entry = skeleton["w"]
        assert isinstance(entry, TensorEntry)
        assert (entry.name, entry.dtype, entry.shape, entry.strides) == ("w", torch.float32, (2, 3), (3, 1))
        assert (entry.nbytes, entry.whole, len(entry.digest), skeleton["n"]) == (24, True, 32, 3)
        assert (skeleton["a"].kind, skeleton["a"].array, skeleton["b"].kind) == ("array", ">i4", "bytes")
        assert_same(file.read(skeleton["a"]), state["a"])
        assert file.read(skeleton["b"]) == state["b"]
        assert torch.equal(file.read("w"), state["w"])
        assert_same(file.part("a"), state["a"])


def test_a_part_of_a_state_is_found_by_its_keys(tmp_path):
    """Keys of every kind lead to a part, and a wrong one is a KeyError."""
    state = {"a": {1: {"b": [torch.ones(2)]}}, "$x": OrderedDict({("y", 2): 3})}
    write_state(tmp_path / "state", state)
    with StateFile(tmp_path / "state") as file:
        assert torch.equal(file.part("a", 1, "b")[0], torch.ones(2))
        assert file.part("$x", ("y", 2)) == 3
        with pytest.raises(KeyError):
            file.part("a", 2)


def test_names_are_unique_and_human(tmp_path):
    """Paths that would get one name are told apart."""
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), 1: torch.ones(3), "1": torch.ones(4), "": torch.ones(5)}
    write_state(tmp_path / "state", state)
    with StateFile(tmp_path / "state") as file:
        assert list(file.tensors) == ["a.b", "a.b#2", "1", "1#2", "state"]
        assert_same(file.state(), state)


def test_a_lone_tensor_is_a_state(tmp_path):
    """The state may be a single tensor."""
    assert torch.equal(roundtrip(torch.ones(2), tmp_path), torch.ones(2))
