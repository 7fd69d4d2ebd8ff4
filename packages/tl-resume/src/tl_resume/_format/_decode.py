"""Turning the typed JSON of a file back into a nested state."""

from __future__ import annotations

import base64
import dataclasses
import math
import pathlib
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tl_resume._format._dtypes import DTYPES
from tl_resume._format._encode import FACTORIES, MAX_DEPTH, MAX_INT_BITS
from tl_resume._format._entry import TensorEntry
from tl_resume._format._errors import StateFileError
from tl_resume._format._header import Parsed, numbers
from tl_resume._format._sparse import COMPRESSED

_FACTORIES = {name: factory for factory, name in FACTORIES.items()}
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{0,9}(\[\w{1,12}\])?")
_MAPPINGS: dict[str, type] = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}
_LAYOUTS = {name: layout for layout, name in COMPRESSED.items()}


class Decoder:
    """Build the state of a file; what stands for a tensor is up to ``resolve``.

    Args:
        parsed: The header.
        path: The file, for messages.
        resolve: Gives what stands for an entry; called once for each object of the state.
        sparse: Build sparse tensors of their parts, rather than leave the parts as a dict.
    """

    def __init__(self, parsed: Parsed, path: Any, resolve: Callable[[TensorEntry], Any], *, sparse: bool) -> None:
        self._parsed, self._path, self._resolve, self._sparse = parsed, path, resolve, sparse
        self._made: dict[TensorEntry | int, Any] = {}
        self._in_key = False
        self.used: set[str] = {view.name for view in parsed.views}

    def state(self, *keys: Any) -> Any:
        """Build the state, or what lies under the keys of its nested dicts.

        Raises:
            KeyError: There is no such key.
            StateFileError: The tree is not as the format demands.
        """
        node = self._parsed.tree
        for key in keys:
            node = self._child(node, key)
        try:
            return self._decode(node, 0)
        except StateFileError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, RuntimeError) as error:
            text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise StateFileError(f"{self._path} is damaged: its state cannot be rebuilt ({text})") from error

    def _child(self, node: Any, key: Any) -> Any:
        if isinstance(node, dict) and key in node and not (len(node) == 1 and str(key).startswith("$")):
            return node[key]
        if isinstance(node, dict) and len(node) == 1:
            tag, pairs = next(iter(node.items()))
            if tag == "$default_dict":
                pairs = pairs["items"]
            for encoded, child in pairs if tag in _MAPPINGS or tag == "$default_dict" else ():
                if self._decode(encoded, 0) == key:
                    return child
        raise KeyError(key)

    def _fail(self, what: str) -> StateFileError:
        return StateFileError(f"{self._path} is damaged: {what}")

    def _decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:
            raise self._fail(f"its state is nested more than {MAX_DEPTH} deep")
        if isinstance(node, list):
            return [self._decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            if isinstance(node, float) and not math.isfinite(node):  # 1e999, or the NaN of a lenient writer
                raise self._fail("a number of its state is out of range")
            return node
        tag = next(iter(node)) if len(node) == 1 else ""
        if not tag.startswith("$"):
            if any(key.startswith("$") for key in node):
                raise self._fail("an object of its state has more than one type")
            return {key: self._decode(item, depth + 1) for key, item in node.items()}
        return self._typed(tag, node[tag], depth)

    def _items(self, nodes: Any, depth: int, decode: Callable[[Any, int], Any] | None = None) -> list[Any]:
        if not isinstance(nodes, list):
            raise self._fail("a container of its state is no list")
        return [(decode or self._decode)(item, depth + 1) for item in nodes]

    def _key(self, node: Any, depth: int) -> Any:
        outer, self._in_key = self._in_key, True
        key = self._decode(node, depth)
        self._in_key = outer
        return key

    def _pairs(self, nodes: Any, depth: int) -> list[tuple[Any, Any]]:
        if not isinstance(nodes, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in nodes):
            raise self._fail("a mapping of its state is no list of pairs")
        pairs = [(self._key(key, depth + 1), self._decode(item, depth + 1)) for key, item in nodes]
        if len(dict(pairs)) < len(pairs):
            raise self._fail("a mapping of its state has a key twice")
        return pairs

    def _typed(self, tag: str, node: Any, depth: int) -> Any:
        if tag == "$tensor":
            return self._whole(node)
        if tag == "$view":
            return self._view(node)
        scalar = _SCALARS.get(tag)
        if scalar is not None:
            return scalar(node)
        if tag in _MAPPINGS:
            made: Any = _MAPPINGS[tag]()
            made.update(dict(self._pairs(node, depth)))
            return made
        if tag == "$default_dict":
            return defaultdict(_FACTORIES[node["factory"]], self._pairs(node["items"], depth))
        if tag == "$deque":
            limit = node["maxlen"]
            items = self._items(node["items"], depth)
            if limit is not None and (type(limit) is not int or limit < len(items)):
                raise self._fail("a deque of its state is longer than it may be")
            return deque(items, limit)
        if tag in ("$set", "$frozenset"):
            return self._collection(tag, self._items(node, depth, self._key))
        if tag in ("$tuple", "$range", "$slice", "$complex"):
            return self._collection(tag, self._items(node, depth))
        if tag == "$size":
            return torch.Size(numbers(node, f"{self._path} is damaged: a size of its state is"))
        if tag in ("$bytes", "$bytearray"):
            data = self._bytes(node)
            return bytearray(data) if tag == "$bytearray" and isinstance(data, bytes) else data
        if tag == "$numpy_array":
            return self._array(node)
        if tag == "$numpy_scalar":
            return _numpy_scalar(node, self._path)
        if tag in ("$sparse_coo", "$sparse_compressed"):
            return self._sparse_tensor(tag, node)
        raise self._fail(f"its state has the unknown type {tag[:40]!r}")

    def _collection(self, tag: str, items: list[Any]) -> Any:
        if tag == "$tuple":
            return tuple(items)
        if tag in ("$set", "$frozenset"):
            made = set(items)
            if len(made) < len(items):
                raise self._fail("a set of its state has a member twice")
            return made if tag == "$set" else frozenset(made)
        if tag == "$complex":
            if len(items) != 2 or not all(type(item) is float for item in items):
                raise self._fail("a complex number of its state is not made of two floats")
            return complex(*items)
        if len(items) != 3:
            raise self._fail(f"a {tag[1:]} of its state has {len(items)} parts, not 3")
        return range(*items) if tag == "$range" else slice(*items)

    def _whole(self, name: Any) -> Any:
        entry = self._parsed.tensors.get(name) if isinstance(name, str) else None
        if entry is None:
            raise self._fail(f"its state names a tensor {name!r:.80} that it does not hold")
        self.used.add(entry.name)
        return self._object(entry, entry)

    def _view(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index < len(self._parsed.views):
            raise self._fail(f"its state names a view {index!r:.80} that it does not describe")
        return self._object(index, self._parsed.views[index])

    def _object(self, key: Any, entry: TensorEntry) -> Any:
        if self._in_key:
            raise self._fail(f"the tensor {entry.name!r:.80} is a key or the member of a set")
        if key not in self._made:
            self._made[key] = self._resolve(entry)
        return self._made[key]

    def _stored(self, entry: TensorEntry, **changes: Any) -> Any:
        if entry.name in self.used:
            raise self._fail(f"its state uses the bytes of {entry.name!r:.80} for two things")
        self.used.add(entry.name)
        return self._resolve(dataclasses.replace(entry, **changes))

    def _bytes(self, node: Any) -> Any:
        if isinstance(node, dict):
            entry = self._parsed.tensors[node["tensor"]]
            if entry.dtype is not torch.uint8:
                raise self._fail("bytes of its state are stored as numbers")
            return self._stored(entry, kind="bytes")
        return base64.b64decode(node, validate=True)

    def _array(self, node: Any) -> Any:
        dtype = numpy_dtype(node["dtype"], self._path)
        shape = numbers(node["shape"], f"{self._path} is damaged: an array of its state has the shape")
        entry = self._parsed.tensors[node["tensor"]]
        if len(shape) > 32 or math.prod(shape) * dtype.itemsize != entry.nbytes or node["order"] not in ("C", "F"):
            raise self._fail(f"the array {entry.name!r:.80} of its state does not fit its bytes")
        return self._stored(entry, kind="array", array=node["dtype"], array_shape=shape, array_order=node["order"])

    def _sparse_tensor(self, tag: str, node: dict[str, Any]) -> Any:
        size = numbers(node["size"], f"{self._path} is damaged: a sparse tensor has the size")
        names = ("indices", "values") if tag == "$sparse_coo" else ("pointers", "indices", "values")
        parts = {name: self._decode(node[name], MAX_DEPTH) for name in names}
        if not self._sparse:
            return {**parts, "size": size}
        if not all(isinstance(part, Tensor) for part in parts.values()):
            raise self._fail("a sparse tensor of its state is not made of tensors")
        if tag == "$sparse_coo":
            made = torch.sparse_coo_tensor(parts["indices"], parts["values"], size, check_invariants=True)
            if node["coalesced"] is True:
                with torch.no_grad():
                    made._coalesced_(True)
            return made
        pointers, indices, values = parts.values()
        return torch.sparse_compressed_tensor(
            pointers, indices, values, size, layout=_LAYOUTS[node["layout"]], check_invariants=True
        )


def numpy_dtype(name: Any, path: Any) -> Any:
    """Find numpy's dtype of a name.

    Raises:
        ModuleNotFoundError: The file holds arrays and numpy is not installed.
        StateFileError: No name of numpy's.
    """
    if not isinstance(name, str) or _ARRAY_DTYPE.fullmatch(name) is None:
        raise StateFileError(f"{path} is damaged: an array of its state has the dtype {name!r:.80}")
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} holds numpy arrays, and numpy is not installed", name="numpy") from error
    try:
        return numpy.dtype(name)
    except TypeError:
        raise StateFileError(f"{path} is damaged: an array of its state has the dtype {name!r:.80}") from None


def _numpy_scalar(node: Any, path: Any) -> Any:
    dtype = numpy_dtype(node["dtype"], path)
    data = bytes.fromhex(node["bytes"])
    if len(data) != dtype.itemsize:
        raise StateFileError(f"{path} is damaged: a numpy scalar of its state has {len(data)} bytes")
    if not data:
        return dtype.type()
    import numpy

    try:
        return numpy.frombuffer(data, dtype)[0]
    except SystemError:  # so numpy says that a character is beyond Unicode
        raise StateFileError(f"{path} is damaged: a numpy scalar of its state is no text") from None


def _int(node: str) -> int:
    value = int(node, 16)
    if value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"an int of {value.bit_length():,} bits")
    return value


def _float(node: str) -> float:
    data = bytes.fromhex(node)
    if len(data) != 8:
        raise ValueError(f"a float of {len(data)} bytes")
    (value,) = struct.unpack(">d", data)
    return float(value)


def _str(node: str) -> str:
    return bytes.fromhex(node).decode("utf-8", "surrogatepass")


def _dtype(node: str) -> torch.dtype:
    return DTYPES[node]


def _named(kind: type) -> Callable[[str], Any]:
    def find(node: str) -> Any:
        found = getattr(torch, node, None) if isinstance(node, str) else None
        if not isinstance(found, kind):
            raise ValueError(f"torch has no {kind.__name__} {node!r:.80}")
        return found

    return find


def _path(node: Any) -> Any:
    flavour, text = node
    if isinstance(text, dict):
        text = _str(text["$str"])
    if not isinstance(text, str) or "\0" in text or flavour not in ("posix", "windows"):
        raise ValueError("a path is no text")
    return pathlib.Path(text)


def _pure_path(node: Any) -> Any:
    kind = pathlib.PureWindowsPath if node[0] == "windows" else pathlib.PurePosixPath
    return kind(_path(node) if isinstance(node[1], dict) else node[1])


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$int": _int,
    "$float": _float,
    "$str": _str,
    "$dtype": _dtype,
    "$device": torch.device,
    "$layout": _named(torch.layout),
    "$memory_format": _named(torch.memory_format),
    "$path": _path,
    "$pure_path": _pure_path,
}
