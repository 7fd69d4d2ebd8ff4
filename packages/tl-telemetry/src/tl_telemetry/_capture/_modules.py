"""What a module holds, under the names of its author."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tl_core import parameter_names
from tl_telemetry._capture._kinds import is_library

# What torch's modules keep beside parameters and buffers is construction or machinery; so are these of any module.
_MACHINERY = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def module_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Name the modules as ``parameter_names`` names their parameters; of a wrapper, only what it wraps."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    names: dict[str, nn.Module] = {}
    for raw, part in module.named_modules():
        name = ".".join(piece for piece in raw.split(".") if piece not in _WRAPPERS)
        names[name] = part  # what is wrapped comes after its wrapper
    return names


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper around the whole model wraps; None for a model that is none."""
    parallel = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    names = ("module",) if parallel else _WRAPPERS
    return next((held for name in names if (held := module._modules.get(name)) is not None), None)


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers (persistent or not) of a module by name, tied ones under each name."""
    tensors: dict[str, Tensor] = dict(parameter_names(module, remove_duplicate=False))
    for name, part in module_parts(module).items():
        for own, buffer in part._buffers.items():
            if buffer is not None:
                tensors.setdefault(f"{name}.{own}" if name else own, buffer)
    return tensors


def module_attributes(part: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that the author of a module gave it; of a library's, the numbers (``Dropout.p``)."""
    if is_library(type(part)):
        held = {name: value for name, value in vars(part).items() if name not in _MACHINERY and name[0] != "_"}
        return {name: value for name, value in held.items() if isinstance(value, (bool, int, float))}
    return {name: value for name, value in vars(part).items() if name not in _MACHINERY}
