"""The names of a setup's parts, the same whether the model is compiled or wrapped or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tl_core import TrainingSetup, parameter_names
from tl_resume._iterators import made_iterators

_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_OWN_ATTRIBUTES = frozenset({"model", "optimizers", "schedulers", "scaler", "state", "step_index", "driver"})


def clean_keys(module: nn.Module, keys: Iterator[str] | list[str]) -> dict[str, str]:
    """Map the author's names to the keys of a ``state_dict`` (or names of ``named_modules``) of a wrapped module.

    What ``torch.compile``, activation checkpointing, FSDP and data parallel wrappers insert is cut out.
    """
    parallel = _parallel_components(module)
    cleaned: dict[str, str] = {}
    for key in keys:
        kept = [part for part in key.split(".") if part not in _WRAPPER_COMPONENTS]
        name = ".".join(kept[parallel:])
        cleaned[key if name in cleaned else name] = key
    return cleaned


def _parallel_components(module: nn.Module) -> int:
    count = 0
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            count += 1
            module = module.module
            continue
        inner = [module._modules[part] for part in _WRAPPER_COMPONENTS if part in module._modules]
        if len(inner) != 1 or inner[0] is None:
            return count
        module = inner[0]


def module_modes(module: nn.Module, prefix: str = "") -> dict[str, list[nn.Module]]:
    """List the modules under the author's names; a wrapper and what it wraps have one name."""
    parallel = _parallel_components(module)
    found: dict[str, list[nn.Module]] = {}
    for raw, part in module.named_modules():
        kept = [component for component in raw.split(".") if component and component not in _WRAPPER_COMPONENTS]
        name = ".".join([prefix, *kept[parallel:]] if prefix else kept[parallel:])
        found.setdefault(name, []).append(part)
    return found


def attributes(setup: TrainingSetup) -> dict[str, Any]:
    """List the attributes that the person has set on a setup.

    Those that are parts of it under another name are left out, and iterators whose position is in their loader's state.
    """
    known = {id(part) for part in (setup.model, setup.scaler, *setup.optimizers.values(), *setup.schedulers.values())}
    known |= {id(module) for module in setup.model.modules()} | {id(value) for value in setup.state.values()}
    known.discard(id(None))
    left_out = _OWN_ATTRIBUTES.union(made_iterators(setup).get("attributes", ()))
    return {
        name: value
        for name, value in vars(setup).items()
        if name not in left_out and (id(value) not in known or not hasattr(value, "__dict__"))
    }


def trained_tensors(setup: TrainingSetup) -> dict[str, Tensor]:
    """Name all parameters of a setup, and the tensors that its optimizers train beside them, each once.

    Those of the model have the model's names, those of ``setup.state`` begin with ``state.``, those of modules and
    tensors that are attributes with ``setup.``; what is nowhere else is ``optimizer#3``, its position in the optimizer.
    """
    named = _owned_tensors(setup)
    named.update(stray_tensors(setup))
    return named


def stray_tensors(setup: TrainingSetup) -> dict[str, Tensor]:
    """Name the tensors that an optimizer trains and that nothing else of the setup holds; their values are state."""
    owned = _owned_tensors(setup)
    seen = {id(tensor) for tensor in owned.values()}
    strays: dict[str, Tensor] = {}
    for name, tensor in _only_in_optimizers(setup):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            strays[_free(name, owned)] = tensor
    return strays


def _owned_tensors(setup: TrainingSetup) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(parameter_names(setup.model))
    seen = {id(tensor) for tensor in named.values()}
    owners = [(f"state.{name}", value) for name, value in setup.state.items()]
    owners += [(f"setup.{name}", value) for name, value in attributes(setup).items()]
    for owner, value in owners:
        found: dict[str, Tensor] = {}
        if isinstance(value, nn.Module):
            found = {f"{owner}.{name}": parameter for name, parameter in parameter_names(value).items()}
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            found = {owner: value}
        for name, tensor in found.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[_free(name, named)] = tensor
    return named


def _only_in_optimizers(setup: TrainingSetup) -> Iterator[tuple[str, Tensor]]:
    for name, optimizer in setup.optimizers.items():
        tensors = [tensor for group in optimizer.param_groups for tensor in group.get("params", ())]
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                yield f"{name}#{index}", tensor


def _free(name: str, taken: dict[str, Tensor]) -> str:
    while name in taken:
        name += "'"
    return name
