"""What a module holds, under the names of its author."""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from tl_core import module_names, parameter_names
from tl_telemetry._capture._kinds import is_library

# What torch's modules keep beside parameters and buffers is construction or machinery; so are these of any module.
_MACHINERY = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers (persistent or not) of a module by name, tied ones under each name."""
    tensors: dict[str, Tensor] = dict(parameter_names(module, remove_duplicate=False))
    for name, part in module_names(module).items():
        for own, buffer in part._buffers.items():
            if buffer is not None:
                tensors.setdefault(f"{name}.{own}" if name else own, buffer)
    return tensors


def module_attributes(part: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that the author of a module gave it; of a library's, the numbers (``Dropout.p``)."""
    if is_library(type(part)):
        held = {name: value for name, value in vars(part).items() if name not in _MACHINERY and name[0] != "_"}
        return {name: value for name, value in held.items() if isinstance(value, (bool, int, float))}
    cls: Any = type(part)  # mypy takes a class of modules for unhashable
    machinery = _MACHINERY | _private_parts(cls)
    return {name: value for name, value in vars(part).items() if name not in machinery}


@lru_cache(maxsize=1024)
def _private_parts(cls: type) -> frozenset[str]:
    """Return the private attributes that a library's base class makes: its machinery (a LightningModule's Trainer)."""
    makers = (vars(base).get("__init__") for base in cls.__mro__ if is_library(base))
    codes = (maker.__code__ for maker in makers if isinstance(maker, types.FunctionType))
    return frozenset(name for code in codes for name in code.co_names if name[0] == "_")
