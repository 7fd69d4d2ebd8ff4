"""What kind of thing an object is, for the capture: state, something that holds state, or neither."""

from __future__ import annotations

import argparse
import enum
import sys
import sysconfig
import types
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch

from tl_telemetry._libraries import NEVER_OWN

IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    range,
    slice,
    enum.Enum,
    PurePath,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_LIBRARY_FOLDERS = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_OPAQUE = (types.ModuleType, types.FunctionType, type, types.BuiltinFunctionType, types.MethodType)


def is_library(cls: type) -> bool:
    """Tell whether a class comes from the standard library or an installed package, not from the person's own code."""
    return _from_library(cls.__module__)


def is_looked_into(cls: type) -> bool:
    """Tell whether the attributes of a class's objects are state: of the person's classes, and of namespaces."""
    return not is_library(cls) or issubclass(cls, (types.SimpleNamespace, argparse.Namespace))


@lru_cache(maxsize=4096)
def _from_library(module_name: str) -> bool:
    top = module_name.partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top in NEVER_OWN or top == "numpy":
        return True
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    return file.startswith(_LIBRARY_FOLDERS) or "site-packages" in file or "dist-packages" in file


def is_stateful(value: Any) -> bool:
    """Tell whether an object says itself what its state is."""
    cls = type(value)
    return callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None))


def is_array(value: Any) -> bool:
    """Tell whether a value is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_plain(value: Any) -> bool:
    """Tell whether a value cannot change: a number (numpy's too), a string, None, a dtype, ..."""
    if isinstance(value, IMMUTABLE):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_opaque(value: Any) -> bool:
    """Tell whether a value is not looked into: a module, a function, a method, a class."""
    return isinstance(value, _OPAQUE)


def names_itself(key: Any) -> bool:
    """Tell whether a key of a dict, or an item of a set, means the same in another process or setup."""
    return isinstance(key, (tuple, frozenset)) or is_plain(key) or is_opaque(key)
