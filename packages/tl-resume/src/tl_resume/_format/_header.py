"""The header of a file: written with room for the digests, and read with distrust."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from tl_resume._format._dtypes import AS_REAL, DTYPES, FROM_FILE, file_form, is_supported
from tl_resume._format._entry import TensorEntry, contiguous_strides, is_dense, span
from tl_resume._format._errors import StateFileError, short
from tl_resume._format._storage import Plan, Stored

FORMAT_VERSION = 1
KEY = "tl-resume"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library reads no longer ones
DIGEST_LENGTH = 32
# A header of ours begins with exactly this, and the header's own digest follows.
PREFIX = f'{{"__metadata__":{{"{KEY}":"{{\\"version\\":{FORMAT_VERSION},\\"header\\":\\"'.encode()
_VERSION = re.compile(rb'.{8}\{"__metadata__":\{"%s":"\{\\"version\\":(\d{1,9})' % KEY.encode(), re.DOTALL)
_MAX_NUMBER = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")


def new_digest() -> Any:
    """Start the digest of a stretch of bytes."""
    return xxhash.xxh3_128()


def build_header(plan: Plan, tree: Any, *, align: int = 8) -> tuple[bytearray, list[Stored], int]:
    """Make the header, its digests still zeros.

    Args:
        plan: What is stored.
        tree: The nested state.
        align: Pad the header so that the tensors begin at a multiple of this many bytes.

    Returns:
        The header without its length, the tensors in file order, and where in the header the tensors' digests begin.

    Raises:
        ValueError: The header would be longer than safetensors allows.
    """
    # widest elements first, so that every tensor is aligned in the file
    ordered = sorted(plan.stored, key=lambda stored: -min(stored.dtype.itemsize, 8))
    entries: dict[str, Any] = {}
    special: dict[str, Any] = {}
    end = 0
    for stored in ordered:
        code, shape = file_form(stored.dtype, stored.shape)
        begin, end = end, end + math.prod(stored.shape) * stored.dtype.itemsize
        entries[stored.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        extra: dict[str, Any] = {}
        if stored.dtype in AS_REAL:
            extra["dtype"] = str(stored.dtype).removeprefix("torch.")
        if stored.strides != contiguous_strides(stored.shape):
            extra["strides"] = list(stored.strides)
        if extra:
            special[stored.name] = extra
    zeros = "0" * DIGEST_LENGTH
    meta = {
        "version": FORMAT_VERSION,
        "header": zeros,
        "digests": zeros * len(ordered),
        "tensors": special,
        "views": plan.views,
        "state": tree,
    }
    text = json.dumps(
        {"__metadata__": {KEY: json.dumps(meta, separators=(",", ":"))}, **entries}, separators=(",", ":")
    )
    header = bytearray(text.encode())
    header += b" " * (-(8 + len(header)) % align)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the names and the plain values of the state take {len(header) / 1e6:.0f} MB, more than the 100 MB that a "
            "safetensors header may have: keep long lists of numbers as tensors or arrays"
        )
    assert header.startswith(PREFIX)
    return header, ordered, len(PREFIX) + DIGEST_LENGTH + len('\\",\\"digests\\":\\"')


def seal_header(header: bytearray, at: int, digests: Iterable[str]) -> None:
    """Write the digests into the header, that of the header itself last."""
    joined = "".join(digests).encode()
    header[at : at + len(joined)] = joined
    header[len(PREFIX) : len(PREFIX) + DIGEST_LENGTH] = header_digest(header).encode()


def header_digest(header: bytes | bytearray) -> str:
    """Digest a header in which its own digest counts as zeros."""
    digest = new_digest()
    view = memoryview(header)
    digest.update(view[: len(PREFIX)])
    digest.update(b"0" * DIGEST_LENGTH)
    digest.update(view[len(PREFIX) + DIGEST_LENGTH :])
    return str(digest.hexdigest())


def stated_version(start: bytes) -> int | None:
    """Find the format version in the first 128 bytes of a file; None where they are not those of a state file."""
    found = _VERSION.match(start)
    return None if found is None else int(found.group(1))


@dataclass
class Parsed:
    """Hold a validated header.

    Attributes:
        version: The format version.
        tree: The nested state, as typed JSON.
        tensors: The stored tensors by name, in file order.
        begins: By name, where their bytes begin behind the header.
        views: The views of stored tensors.
    """

    version: int
    tree: Any
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    views: list[TensorEntry] = field(default_factory=list)


def parse_header(header: bytes, data_bytes: int, path: Any) -> Parsed:
    """Read a header and believe none of it.

    Raises:
        StateFileError: Anything is not as the format demands.
    """
    listed = _load_json(header, path, "the header")
    meta = _our_metadata(listed, path)
    version = meta.get("version")
    if type(version) is not int or version < 1:
        raise StateFileError(f"{path} is damaged: its format version is {short(version)}")
    if version > FORMAT_VERSION:
        raise StateFileError(
            f"{path} was written by a newer version: its format is {short(version)}, "
            f"this one reads up to {FORMAT_VERSION}"
        )
    if not header.startswith(PREFIX) or meta.get("header") != header_digest(header):
        raise StateFileError(f"{path} is damaged: its header is not the one that was written (its digest differs)")
    # From here on a fault needs a header that was made to deceive: its digest is right.
    if set(meta) != {"version", "header", "digests", "tensors", "views", "state"}:
        raise StateFileError(f"{path} is damaged: its metadata has the keys {short(sorted(meta))}")
    parsed = Parsed(version, meta["state"])
    _read_entries(listed, meta, data_bytes, parsed, path)
    _read_views(meta["views"], parsed, path)
    return parsed


def _load_json(text: bytes | str, path: Any, what: str) -> Any:
    """Read JSON in which no key stands twice.

    Raises:
        StateFileError: It is not JSON, not UTF-8, nested too deeply, or a key stands twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise StateFileError(f"{path} is damaged: {what} has the key {short(twice)} twice")
        return made

    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=unique)
    except StateFileError:
        raise
    except RecursionError:
        raise StateFileError(f"{path} is damaged: {what} is nested too deeply") from None
    except (ValueError, OverflowError, MemoryError) as error:
        raise StateFileError(f"{path} is damaged: {what} is not JSON ({str(error)[:200]})") from None


def _our_metadata(listed: Any, path: Any) -> dict[str, Any]:
    if not isinstance(listed, dict):
        raise StateFileError(f"{path} is damaged: its header is not a JSON object")
    metadata = listed.get("__metadata__", {})
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise StateFileError(
            f"{path} is not a training state of tl-resume: its header has no {KEY!r} metadata "
            "(tl-resume diff and tl-resume show read other safetensors files too)"
        )
    meta = _load_json(metadata[KEY], path, "the metadata")
    if not isinstance(meta, dict):
        raise StateFileError(f"{path} is damaged: its metadata is not a JSON object")
    return meta


def _read_entries(listed: dict[str, Any], meta: dict[str, Any], data_bytes: int, parsed: Parsed, path: Any) -> None:
    names = [name for name in listed if name != "__metadata__"]
    digests, special = meta["digests"], meta["tensors"]
    if not isinstance(digests, str) or len(digests) != DIGEST_LENGTH * len(names) or not isinstance(special, dict):
        raise StateFileError(f"{path} is damaged: its digests do not fit its {len(names)} tensors")
    if unknown := [name for name in special if name not in listed]:
        raise StateFileError(f"{path} is damaged: it describes a tensor {short(unknown[0])} that it does not hold")
    position = 0
    for index, name in enumerate(names):
        where = f"{path} is damaged: the tensor {short(name)}"
        dtype, file_shape, begin, end = _read_listed(listed[name], where)
        if begin != position or end < begin:
            raise StateFileError(f"{where} lies at {begin} to {end}, where {position} was to be its beginning")
        position = end
        dtype, shape, strides = _read_special(special.get(name, {}), dtype, file_shape, where)
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise StateFileError(f"{where} has {end - begin} bytes, not those of its shape {tuple(file_shape)}")
        digest = digests[index * DIGEST_LENGTH : (index + 1) * DIGEST_LENGTH]
        if _DIGEST.fullmatch(digest) is None:
            raise StateFileError(f"{where} has no digest")
        parsed.tensors[name] = TensorEntry(name, dtype, shape, strides, end - begin, digest)
        parsed.begins[name] = begin
    if position != data_bytes:
        raise StateFileError(f"{path} is damaged: it holds {data_bytes} bytes of tensors, its header lists {position}")


def _read_listed(entry: Any, where: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise StateFileError(f"{where} is not described by dtype, shape and data_offsets")
    code = entry["dtype"]
    if not isinstance(code, str) or code not in FROM_FILE:
        raise StateFileError(f"{where} has the dtype {short(code)}, which this version of torch does not have")
    shape = numbers(entry["shape"], f"{where} has the shape")
    offsets = numbers(entry["data_offsets"], f"{where} has the offsets")
    if len(offsets) != 2:
        raise StateFileError(f"{where} has {len(offsets)} offsets, not 2")
    return FROM_FILE[code], shape, offsets[0], offsets[1]


def _read_special(
    extra: Any, dtype: torch.dtype, shape: tuple[int, ...], where: str
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    if not isinstance(extra, dict) or not set(extra) <= {"dtype", "strides"}:
        raise StateFileError(f"{where} has an unknown property")
    code = file_form(dtype, ())[0]
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise StateFileError(f"{where} has the shape {shape}, but holds two numbers a byte")
        shape = (*shape[:-1], shape[-1] // 2)
    if "dtype" in extra:
        real = DTYPES.get(extra["dtype"]) if isinstance(extra["dtype"], str) else None
        if real is None or AS_REAL.get(real) != code or shape[-1:] != (2,):
            raise StateFileError(f"{where} cannot be read as {short(extra['dtype'])}")
        dtype, shape = real, shape[:-1]
    strides = contiguous_strides(shape)
    if "strides" in extra:
        strides = numbers(extra["strides"], f"{where} has the strides")
        if len(strides) != len(shape) or not is_dense(shape, strides):
            raise StateFileError(f"{where} has strides {strides}, which do not fit its shape {shape}")
    return dtype, shape, strides


def _read_views(views: Any, parsed: Parsed, path: Any) -> None:
    if not isinstance(views, list):
        raise StateFileError(f"{path} is damaged: its views are not a list")
    for index, view in enumerate(views):
        where = f"{path} is damaged: view {index}"
        if not isinstance(view, dict) or set(view) != {"tensor", "dtype", "shape", "strides", "offset"}:
            raise StateFileError(f"{where} is not described by tensor, dtype, shape, strides and offset")
        base = parsed.tensors.get(view["tensor"]) if isinstance(view["tensor"], str) else None
        dtype = DTYPES.get(view["dtype"]) if isinstance(view["dtype"], str) else None
        if base is None or dtype is None or not is_supported(dtype):
            raise StateFileError(f"{where} is one of {short(view['tensor'])} as {short(view['dtype'])}")
        shape = numbers(view["shape"], f"{where} has the shape")
        strides = numbers(view["strides"], f"{where} has the strides")
        (offset,) = numbers([view["offset"]], f"{where} has the offset")
        size = dtype.itemsize
        fits = len(shape) == len(strides) and 0 not in shape and offset % size == 0 and math.prod(shape) <= _MAX_NUMBER
        if not fits or offset + span(shape, strides) * size > base.nbytes:
            raise StateFileError(f"{where} does not lie within the tensor {short(base.name)}")
        parsed.views.append(
            TensorEntry(base.name, dtype, shape, strides, base.nbytes, base.digest, offset, whole=False)
        )


def numbers(values: Any, where: str) -> tuple[int, ...]:
    """Check that a value of a header is a list of numbers that a file or a tensor can have."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in values):
        raise StateFileError(f"{where} {short(values)}")
    return tuple(values)
