"""Values that a header of good faith does not hold."""

from __future__ import annotations

import copy
import random
from typing import Any

RAW = "\ue001"
_HUGE = (2**31, 2**32, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))
_TOKENS = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "-0",
    "-0.0",
    "1e-999",
    "1" + "0" * 5000,
    "[" * 99 + "]" * 99,
)
_DEEP = ("[" * 200 + "]" * 200, "[" * 20_000 + "]" * 20_000, '{"a":' * 3000 + "0" + "}" * 3000)
_SCALARS = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, "", "x", "a" * 300, "0" * 32, "\ud800", "weight",
    "model.safetensors.index.json", "../a", "float32", "$tensor",
    "F32", "C64", "F4", "U8", "F8_E5M2", "complex128", "quint8", "bits8", "int1", "float4_e2m1fn_x2", "\0",
)  # fmt: skip
_CONTAINERS: tuple[Any, ...] = ([], {}, [[]], [0], [1, 2], ["a"], {"": 0}, {"a": 1}, [None] * 50, [[1, 2], [1, 3]])
_ARRAY = {"dtype": "<f4", "shape": [2], "order": "C", "tensor": "array"}
_COO = {"indices": {"$tensor": "coo.indices"}, "values": {"$tensor": "coo.values"}, "size": [3, 3], "coalesced": True}
_CSR = {
    "layout": "csr",
    "pointers": {"$tensor": "csr.pointers"},
    "indices": {"$tensor": "csr.indices"},
    "values": {"$tensor": "csr.values"},
    "size": [3, 3],
}
_TAGGED: tuple[Any, ...] = (
    {"$tensor": "weight"}, {"$tensor": "model.weight"}, {"$tensor": "x"}, {"$tensor": 0}, {"$tensor": None},
    {"$view": 0}, {"$view": 1}, {"$view": -1}, {"$view": 2**70}, {"$view": True}, {"$view": "0"},
    {"$int": "0x10"}, {"$int": hex(10**400)}, {"$int": hex(10**6000)}, {"$int": "x"}, {"$int": 5}, {"$int": ""},
    {"$float": "7ff0000000000001"}, {"$float": "7ff0000000000000"}, {"$float": ""}, {"$float": 1.0},
    {"$str": "eda080"}, {"$str": "ff"}, {"$str": "z"}, {"$bytes": ""}, {"$bytes": "!"},
    {"$bytes": {"tensor": "long"}},
    {"$bytes": {"tensor": "weight"}}, {"$bytes": {}}, {"$bytearray": {"tensor": "array"}}, {"$bytearray": 3},
    {"$numpy_array": _ARRAY}, {"$numpy_array": {**_ARRAY, "shape": [2**60]}},
    {"$numpy_array": {**_ARRAY, "dtype": "|O8"}},
    {"$numpy_array": {**_ARRAY, "dtype": "<U999999999", "shape": [0]}},
    {"$numpy_array": {**_ARRAY, "shape": [0, 2**62]}},
    {"$numpy_array": {**_ARRAY, "dtype": "<M8[x]"}}, {"$numpy_array": {**_ARRAY, "dtype": "<f3"}},
    {"$numpy_array": []},
    {"$numpy_array": {**_ARRAY, "shape": [1] * 33 + [2]}},
    {"$numpy_array": {**_ARRAY, "dtype": "<M8[s]", "shape": [1]}},
    {"$numpy_scalar": {"dtype": "<f8", "bytes": "00" * 8}}, {"$numpy_scalar": {"dtype": "<U0", "bytes": ""}},
    {"$numpy_scalar": {"dtype": "<U1", "bytes": "ffffffff"}},
    {"$numpy_scalar": {"dtype": "<M8", "bytes": "00" * 8}},
    {"$numpy_scalar": {"dtype": "|b1", "bytes": "07"}}, {"$numpy_scalar": {"dtype": 3, "bytes": None}},
    {"$tuple": []}, {"$tuple": {}}, {"$tuple": [1, [2]]}, {"$set": [1, 1]}, {"$set": [[1]]},
    {"$set": [True, 1]},
    {"$frozenset": [1]}, {"$frozenset": [{"$float": "7ff8000000000000"}]}, {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[[], 1]]}, {"$dict": [[1]]}, {"$dict": [[1, 0], [True, 0]]}, {"$dict": {}},
    {"$dict": [["a", 0]]},
    {"$ordered_dict": [["a", 0]]}, {"$ordered_dict": 0}, {"$counter": [["a", "x"]]}, {"$counter": [[[], 1]]},
    {"$default_dict": {"factory": "list", "items": []}}, {"$default_dict": {"factory": "eval", "items": []}},
    {"$default_dict": {"factory": [], "items": [[1, 2]]}}, {"$default_dict": []},
    {"$deque": {"items": [1, 2], "maxlen": 1}}, {"$deque": {"items": [], "maxlen": 2**70}},
    {"$deque": {"items": [], "maxlen": -1}}, {"$deque": {"items": [1], "maxlen": None}}, {"$deque": {}},
    {"$range": [0, 2**70, 1]}, {"$range": [0, 5, 0]}, {"$range": [0, "x", 1]}, {"$range": [0, 2**50, 1]},
    {"$range": []},
    {"$slice": [None, None, None]}, {"$slice": [[], {}, "x"]}, {"$size": [2**60]}, {"$size": [2**63 - 1, 0]},
    {"$size": [-1]}, {"$size": "x"}, {"$complex": [1.0, 2.0]}, {"$complex": [1, 2]}, {"$complex": [None]},
    {"$dtype": "float32"}, {"$dtype": "nn"}, {"$dtype": []}, {"$device": "cuda:99"}, {"$device": "meta"},
    {"$device": "x:y"}, {"$device": 2**80}, {"$device": None}, {"$layout": "strided"}, {"$layout": "float32"},
    {"$memory_format": "channels_last"}, {"$memory_format": "__doc__"}, {"$path": ["posix", "a"]},
    {"$path": ["posix", "\0"]}, {"$path": ["x", "a"]}, {"$path": []}, {"$path": ["posix", {"$str": "eda080"}]},
    {"$path": {"posix": 0, "a": 1}}, {"$pure_path": ["windows", "a\\b"]}, {"$pure_path": ["x", 0]},
    {"$pure_path": 7},
    {"$sparse_coo": _COO}, {"$sparse_coo": {**_COO, "size": [2**40, 2**40]}},
    {"$sparse_coo": {**_COO, "size": []}},
    {"$sparse_coo": {**_COO, "indices": _COO["values"]}}, {"$sparse_coo": {**_COO, "coalesced": 1}},
    {"$sparse_coo": 0},
    {"$sparse_compressed": _CSR}, {"$sparse_compressed": {**_CSR, "layout": "csc"}},
    {"$sparse_compressed": {**_CSR, "size": [2**60, 2**60]}}, {"$sparse_compressed": {**_CSR, "layout": "bsr"}},
    {"$sparse_compressed": {**_CSR, "values": 1}}, {"$sparse_compressed": {**_CSR, "layout": None}},
    {"$unknown": 1}, {"$": 0}, {"$tensor": "weight", "$view": 0}, {"$tuple": [], "x": 1},
)  # fmt: skip
_MAPPING_TAGS = ("$dict", "$ordered_dict", "$counter")
_LIST_TAGS = ("$tuple", "$set", "$frozenset", "$size", "$range", "$slice", "$complex", "$dict", "$deque")


def fresh_value(rng: random.Random) -> Any:
    """Make a value that does not belong where it is put."""
    kind = rng.random()
    if kind < 0.25:
        return copy.deepcopy(rng.choice(_SCALARS))
    if kind < 0.35:
        return rng.choice(_HUGE)
    if kind < 0.45:
        return RAW + rng.choice(_TOKENS if rng.random() < 0.8 else _DEEP) + RAW
    if kind < 0.55:
        return copy.deepcopy(rng.choice(_CONTAINERS))
    if kind < 0.65:
        return [rng.choice((0, 1, 2, 3, 2**31, 2**60, 2**62, 2**63 - 1)) for _ in range(rng.randrange(5))]
    return copy.deepcopy(rng.choice(_TAGGED))


def perturbed(rng: random.Random, value: Any) -> Any:
    """Change a value a little, mostly within its type."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value)))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value + 2**32, float(value % 2**53), str(value)))
    if isinstance(value, float):
        return rng.choice((-value, value * 2, int(value) if abs(value) < 1e300 else 0, f"{RAW}1e999{RAW}", str(value)))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            (value[:at], value[:at] + "x" + value[at + 1 :], value + "0", value.upper(), f"${value}", value * 2)
        )
    if isinstance(value, list):
        items = list(value)
        at = rng.randrange(len(items) + 1)
        return rng.choice(
            (items[:at], items[at:], items + items[:1], items[::-1], [items], dict.fromkeys(map(str, items[:5])))
        )
    if isinstance(value, dict):
        return rng.choice(
            (list(value), list(value.values()), dict(list(value.items())[1:]), {"a": value}, retagged(rng, value))
        )
    return {}


def retagged(rng: random.Random, value: Any) -> Any:
    """Keep what a node holds and call it something else."""
    tagged = isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith("$")
    inner = next(iter(value.values())) if tagged else value
    if isinstance(inner, dict):
        pairs = [[key, item] for key, item in inner.items()]
        if rng.random() < 0.3:
            return {"$default_dict": {"factory": "list", "items": pairs}}
        return {rng.choice(_MAPPING_TAGS): pairs}
    if isinstance(inner, list):
        return {rng.choice(_LIST_TAGS): inner} if rng.random() < 0.8 else inner
    return {rng.choice(("$tensor", "$view", "$int", "$str", "$bytes", "$dtype", "$device", "$tuple")): inner}
