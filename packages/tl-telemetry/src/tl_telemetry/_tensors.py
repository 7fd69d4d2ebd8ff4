"""The tensors that a run follows: which they are, how they are named, and in which module they live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tl_core import TrainingSetup, parameter_names, unregistered_tensors

# Modules out of torch's sight that are followed; a module made anew in every forward pass would add one each time.
MAX_UNREGISTERED = 32

# Tensors that modules keep and train without registering them.
MAX_LOOSE = 256


@dataclass(slots=True)
class Tracked:
    """One followed parameter.

    Attributes:
        tensor: the parameter itself.
        name: its name in the model, or where it lives otherwise (``criterion.log_var``, ``optimizer group 0 [3]``).
        owner: the module whose forward pass uses it: the one that holds it, or the one around a ``ParameterList``; None
            for a bare tensor.
        in_model: whether the model holds it now.
    """

    tensor: Tensor
    name: str
    owner: nn.Module | None
    in_model: bool


class Tensors:
    """Every parameter of the model, of the setup's other modules and of the optimizers, with stable indices."""

    def __init__(self) -> None:
        self.entries: list[Tracked] = []
        self.index_of: dict[int, int] = {}
        self.module_names: dict[int, str] = {}
        self.unregistered: dict[int, nn.Module] = {}  # index -> the module that holds it
        self.loose: set[int] = set()  # what modules of the setup train in plain attributes, lists and dicts

    @property
    def num_unregistered(self) -> int:
        """How many modules ran inside of the model without being a part of it."""
        return len(set(map(id, self.unregistered.values())))

    def __len__(self) -> int:
        return len(self.entries)

    def name(self, index: int) -> str:
        return self.entries[index].name

    def names(self, indices: Any) -> list[str]:
        return [self.entries[i].name for i in indices]

    def walk(self, setup: TrainingSetup) -> None:
        """Read the modules again: parameters may have been added, replaced or tied since the last walk."""
        for entry in self.entries:
            entry.in_model = False
        users = using_modules(setup.model)
        owners = {
            id(p): users[id(module)]
            for module in setup.model.modules()
            for p in module._parameters.values()
            if p is not None
        }
        for name, parameter in parameter_names(setup.model).items():
            index = self.add(parameter, name, owners.get(id(parameter)))
            entry = self.entries[index]
            entry.name, entry.owner, entry.in_model = name, owners.get(id(parameter)), True
        self.module_names = {id(module): shown_name(name) for name, module in setup.model.named_modules()}
        for label, module in other_modules(setup):
            for name, child in module.named_modules():
                self.module_names.setdefault(id(child), f"{label}.{name}" if name else label)
                for own, parameter in child._parameters.items():
                    if parameter is not None:
                        self.add(parameter, ".".join(part for part in (label, name, own) if part), child)
        for name, tensor in loose_tensors(setup).items():
            # a module that makes one anew in each step would fill up memory
            if id(tensor) not in self.index_of and len(self.loose) < MAX_LOOSE:
                self.loose.add(self.add(tensor, name))

    def add(self, tensor: Tensor, name: str, owner: nn.Module | None = None) -> int:
        """Return the tensor's index, following it from now on if it is new."""
        index = self.index_of.get(id(tensor))
        if index is None:
            index = self.index_of[id(tensor)] = len(self.entries)
            self.entries.append(Tracked(tensor, name, owner, in_model=False))
        return index

    def add_unregistered(self, module: nn.Module, around: nn.Module) -> bool:
        """Follow the parameters of a module that runs inside of the followed module ``around`` and is no part of it.

        Returns:
            Whether some of them are new.
        """
        if id(module) in self.module_names or self.num_unregistered >= MAX_UNREGISTERED:
            return False
        place = _place(module, around) or f"{type(module).__name__}({self.num_unregistered})"
        label = ".".join(part for part in (self.module_names.get(id(around)), place) if part)
        before = len(self.entries)
        for name, parameter in module._parameters.items():
            # functional_call swaps plain tensors, or another model's parameters, into a module for a call
            if type(parameter) is nn.Parameter and parameter.requires_grad and id(parameter) not in self.index_of:
                self.unregistered[self.add(parameter, f"{label}.{name}", module)] = module
        return len(self.entries) > before


def _place(module: nn.Module, around: nn.Module) -> str | None:
    """Return where a module keeps another one that it has not registered: ``layers[0]``, ``heads['a']``."""
    for name, value in vars(around).items():
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        for key, item in value.items() if isinstance(value, dict) else ():
            if item is module and not name.startswith("_"):
                return f"{name}[{key!r}]"
    return None


def kept_aside(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a module keeps in plain lists and dicts, with all that is below them."""
    held: list[nn.Module] = []
    for value in vars(module).values():
        parts = value.values() if type(value) is dict else value if isinstance(value, (list, tuple)) else ()
        held += [part for one in parts if isinstance(one, nn.Module) and one is not module for part in one.modules()]
    registered = set(map(id, module.modules()))
    return [part for part in held if id(part) not in registered]


def other_modules(setup: TrainingSetup) -> list[tuple[str, nn.Module]]:
    """Return the setup's modules beside the model, with their names: entries of ``state`` and extra attributes."""
    own = set(map(id, setup.model.modules()))
    found = {**vars(setup), **setup.state}
    return [
        (name, module)
        for name, module in found.items()
        if isinstance(module, nn.Module) and id(module) not in own and not name.startswith("_")
    ]


def loose_tensors(setup: TrainingSetup) -> dict[str, Tensor]:
    """Return what the modules of a setup train in plain attributes, lists and dicts, by the places where it is."""
    found = unregistered_tensors(setup.model)
    for label, module in other_modules(setup):
        found |= {f"{label}.{name}": tensor for name, tensor in unregistered_tensors(module).items()}
    return found


def using_modules(root: nn.Module) -> dict[int, nn.Module]:
    """Return, by a module's id, the module whose forward pass uses its parameters: itself, or the one around it.

    A container (``ParameterList``, ``ParameterDict``, a holder without a forward) is never called.
    """
    users: dict[int, nn.Module] = {}

    def visit(module: nn.Module, around: nn.Module) -> None:
        if id(module) not in users:
            user = module if _is_called(module) else around
            users[id(module)] = user
            for child in module.children():
                visit(child, user)

    visit(root, root)
    return users


def _is_called(module: nn.Module) -> bool:
    # nn.MultiheadAttention reads the weights of its output projection, of a class made for that, without calling it
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, torch.jit.ScriptModule):  # its class has no readable forward
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_lazy(tensor: Tensor) -> bool:
    """Tell whether a parameter has no shape yet (a lazy module before its first forward pass)."""
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def shown_name(name: str) -> str:
    """Return a module's or buffer's name without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
