"""Turning a nested state into typed JSON and tensors."""

from __future__ import annotations

import base64
import json
import math
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tl_resume._format._dtypes import DTYPE_NAMES, is_supported
from tl_resume._format._entry import contiguous_strides
from tl_resume._format._errors import short
from tl_resume._format._sparse import COMPRESSED, SPARSE, sparse_parts
from tl_resume._format._storage import Leaf, Plan, plan_storage

MAX_DEPTH = 100
# More bytes than this are stored beside the tensors: in the header they would take a third more, up to its limit.
_INLINE_BYTES = 4096
FACTORIES: dict[Any, str | None] = {
    None: None,
    **{kind: kind.__name__ for kind in (bool, dict, float, int, list, set, str, tuple)},
}
# Longer ones Python does not write in decimal (4300 digits at most), nor could a message.
MAX_INT_BITS = 14_000
_INT_BITS = 63  # longer ints are written in hexadecimal, which no reader limits in length or precision


def encode_state(state: Any) -> tuple[Any, Plan]:
    """Split a state into a tree for JSON and the tensors to store.

    Raises:
        TypeError: Something cannot be represented; the message names its path.
        ValueError: Nested more than ``MAX_DEPTH`` deep, or a container that holds itself.
    """
    encoder = _Encoder()
    tree = encoder.encode(state, _Path("state", "", 0))
    plan_storage(encoder.plan, encoder.leaves)
    return tree, encoder.plan


class _Path:
    """Where in the state: as messages write it, and as tensors are named."""

    __slots__ = ("depth", "name", "shown")

    def __init__(self, shown: str, name: str, depth: int) -> None:
        self.shown, self.name, self.depth = shown, name, depth

    def item(self, key: Any) -> _Path:
        text = key if isinstance(key, str) else str(key) if isinstance(key, (int, float)) else repr(key)[:80]
        return _Path(f"{self.shown}[{short(key)}]", f"{self.name}.{text}" if self.name else text, self.depth + 1)

    def part(self, part: str) -> _Path:
        return _Path(f"{self.shown}.{part}", f"{self.name}.{part}" if self.name else part, self.depth + 1)


def _a(value: Any) -> str:
    kind = type(value)
    place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {place}{kind.__qualname__}"


def _hex(value: int, path: _Path) -> str:
    if value.bit_length() > MAX_INT_BITS:
        raise TypeError(
            f"{path.shown} is an int of {value.bit_length():,} bits, more than the {MAX_INT_BITS:,} that can be saved: "
            "keep the bytes of value.to_bytes() instead"
        )
    return hex(value)


class _Encoder:
    def __init__(self) -> None:
        self.plan = Plan()
        self.leaves: list[Leaf] = []
        self._refs: dict[int, dict[str, Any]] = {}
        self._keep: list[Any] = []  # an id is only good while its object lives
        self._in_key = False

    def encode(self, value: Any, path: _Path) -> Any:
        if path.depth > MAX_DEPTH:
            raise ValueError(
                f"{path.shown[:200]}... is nested more than {MAX_DEPTH} deep, or a container that holds itself: "
                "training state is nested a few levels deep"
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() <= _INT_BITS else {"$int": _hex(value, path)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return self._str(value)
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._dict(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        return self._other(value, kind, path)

    def _str(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON would join two surrogates to one character
            return {"$str": value.encode("utf-8", "surrogatepass").hex()}
        return value

    def _dict(self, value: dict[Any, Any], path: _Path) -> Any:
        plain = all(type(key) is str and not key.startswith("$") and self._str(key) is key for key in value)
        if plain:
            return {key: self.encode(item, path.item(key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: dict[Any, Any], path: _Path) -> list[Any]:
        return [[self._key(key, path), self.encode(item, path.item(key))] for key, item in value.items()]

    def _key(self, key: Any, path: _Path) -> Any:
        outer, self._in_key = self._in_key, True
        encoded = self.encode(key, _Path(f"the key {short(key)} of {path.shown}", path.name, path.depth + 1))
        self._in_key = outer
        return encoded

    def _items(self, values: Any, path: _Path) -> list[Any]:
        return [self.encode(item, path.item(index)) for index, item in enumerate(values)]

    def _other(self, value: Any, kind: type, path: _Path) -> Any:
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if kind is OrderedDict:
            return {"$ordered_dict": self._pairs(value, path)}
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if kind is defaultdict:
            if value.default_factory not in FACTORIES:
                raise TypeError(
                    f"{path.shown} is a defaultdict of {short(value.default_factory)}: "
                    f"factories that can be saved are {', '.join(name for name in FACTORIES.values() if name)} and None"
                )
            return {"$default_dict": {"factory": FACTORIES[value.default_factory], "items": self._pairs(value, path)}}
        if kind is deque:
            return {"$deque": {"items": self._items(value, path), "maxlen": value.maxlen}}
        if kind is set or kind is frozenset:
            members = [self._key(item, path) for item in value]
            return {f"${kind.__name__}": sorted(members, key=json.dumps)}
        if kind is bytes or kind is bytearray:
            return {f"${kind.__name__}": self._bytes(bytes(value), path)}
        if kind is complex:
            return {"$complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind is range or kind is slice:
            parts = [value.start, value.stop, value.step]
            return {f"${kind.__name__}": [self.encode(part, path) for part in parts]}
        if kind is torch.Size:
            return {"$size": list(value)}
        if isinstance(value, torch.dtype):
            return {"$dtype": DTYPE_NAMES[value]}
        if kind is torch.device:
            return {"$device": str(value)}
        if isinstance(value, (torch.layout, torch.memory_format)):
            word = "layout" if isinstance(value, torch.layout) else "memory_format"
            return {f"${word}": str(value).removeprefix("torch.")}
        if isinstance(value, pathlib.PurePath) and kind.__module__.partition(".")[0] == "pathlib":
            word = "path" if isinstance(value, pathlib.Path) else "pure_path"
            flavour = "windows" if isinstance(value, pathlib.PureWindowsPath) else "posix"
            return {f"${word}": [flavour, self._str(str(value))]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self._scalar(value, path)
        if numpy is not None and kind is numpy.ndarray:
            return self._array(value, path, numpy)
        hint = ": keep plain data, or give the object a state_dict()"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            hint = ", a named tuple, whose class a file cannot name: save tuple(value) or value._asdict()"
        raise TypeError(f"{path.shown} is {_a(value)}, which cannot be saved without pickle{hint}")

    def _bytes(self, value: bytes, path: _Path) -> Any:
        if len(value) <= _INLINE_BYTES:
            return base64.b64encode(value).decode()
        stored = self.plan.add(value, path.name, torch.uint8, (len(value),), (1,))
        return {"tensor": stored.name}

    def _scalar(self, value: Any, path: _Path) -> Any:
        _check_array_dtype(value.dtype, "a numpy scalar", path)
        data = value.tobytes() if value.dtype.itemsize else b""  # of an empty string numpy gives the closing zeros
        return {"$numpy_scalar": {"dtype": value.dtype.str, "bytes": data.hex()}}

    def _array(self, value: Any, path: _Path, numpy: Any) -> Any:
        _check_array_dtype(value.dtype, "a numpy array", path)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        data = numpy.ascontiguousarray(value)  # row-major, so that every reader of the file gets the array
        native = getattr(torch, value.dtype.name, None) if value.dtype.isnative else None
        if not isinstance(native, torch.dtype) or not is_supported(native):
            native, shape = torch.uint8, (value.nbytes,)
        else:
            shape = value.shape
        raw = memoryview(data.reshape(-1).view(numpy.uint8)) if value.nbytes else b""
        stored = self.plan.add(raw, path.name, native, shape, contiguous_strides(shape))
        form = {"dtype": value.dtype.str, "shape": list(value.shape), "order": order, "tensor": stored.name}
        return {"$numpy_array": form}

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        if self._in_key:
            raise TypeError(f"{path.shown} is a tensor: keys are compared by value, tensors are not")
        known = self._refs.get(id(value))
        if known is not None:
            return known
        self._check_tensor(value, path)
        self._keep.append(value)
        data = value.detach()
        if data.layout in SPARSE:
            ref = self._sparse(data, path)
        else:
            ref = {}
            self.leaves.append(Leaf(data, path.name or "state", ref))
        self._refs[id(value)] = ref
        return ref

    def _sparse(self, value: Tensor, path: _Path) -> dict[str, Any]:
        parts = sparse_parts(value)
        form: dict[str, Any] = {name: self._tensor(part, path.part(name)) for name, part in parts.items()}
        if value.layout is torch.sparse_coo:
            return {"$sparse_coo": {**form, "size": list(value.shape), "coalesced": value.is_coalesced()}}
        return {"$sparse_compressed": {"layout": COMPRESSED[value.layout], **form, "size": list(value.shape)}}

    def _check_tensor(self, value: Tensor, path: _Path) -> None:
        problem = ""
        if is_lazy(value):
            problem = "an uninitialised tensor of a lazy module: run a batch through the module first"
        elif type(value) is not Tensor and type(value) is not nn.Parameter:
            problem = f"{_a(value)}, a tensor subclass: save the plain tensors that it is made of"
        elif value.is_meta:
            problem = "a tensor on the meta device, which has no data"
        elif value.is_quantized:
            problem = "a quantized tensor: save value.int_repr() with its scale and zero point"
        elif value.is_nested:
            problem = "a nested tensor: save the list value.unbind()"
        elif value.layout not in (torch.strided, *SPARSE):
            problem = f"a tensor of layout {str(value.layout).removeprefix('torch.')}: save value.to_dense()"
        elif not is_supported(value.dtype) or ("float4" in str(value.dtype) and not value.dim()):
            problem = f"a tensor of dtype {str(value.dtype).removeprefix('torch.')}, which safetensors cannot carry"
        if problem:
            raise TypeError(f"{path.shown} is {problem}")


def _check_array_dtype(dtype: Any, what: str, path: _Path) -> None:
    if dtype.kind not in "biufcSUmM":
        raise TypeError(
            f"{path.shown} is {what} of dtype {dtype}: only numbers, bools, strings, bytes and dates can be saved"
        )
