"""Tells the person's own code from that of libraries."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from pathlib import PurePath
from typing import Any

from tl_telemetry._libraries import NEVER_OWN


def is_own_namespace(namespace: dict[str, Any]) -> bool:
    """Tell whether the globals of a function belong to the person's code.

    Args:
        namespace: The globals of a function or the ``vars`` of a module.
    """
    return _is_own(namespace.get("__name__"), namespace.get("__file__"))


def is_own_module(module: types.ModuleType) -> bool:
    """Tell whether a module is the person's."""
    return is_own_namespace(vars(module))


def is_own_class(cls: type) -> bool:
    """Tell whether a class is the person's."""
    name = getattr(cls, "__module__", None)
    if not isinstance(name, str):
        return False
    # A module that nothing imported by this name (executed code) is judged by its package, if there is one.
    module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])
    return _is_own(name, getattr(module, "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_own(name: object, file: object) -> bool:
    if name == "__main__" or not isinstance(name, str):
        return True
    top = name.partition(".")[0]
    if top in NEVER_OWN or top in sys.builtin_module_names:
        return False
    if not isinstance(file, str) or file.startswith("<"):
        return top not in sys.stdlib_module_names
    path = PurePath(os.path.abspath(file))
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    return not any(path.is_relative_to(folder) for folder in _library_folders())


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.abspath(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths)
