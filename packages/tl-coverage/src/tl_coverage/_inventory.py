"""What there is to compare: the model's parameters and the optimizers' entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup, group_names, match_names, parameter_names, unregistered_tensors

MAX_SHAPES = 6
Shape = tuple[int, ...] | None  # None: a lazy parameter that has no shape yet


@dataclass(frozen=True, eq=False)  # compared by identity: tensors do not compare to a bool
class Entry:
    """One tensor in one group of one optimizer."""

    tensor: torch.Tensor
    optimizer: str
    group: int
    weight_decay: Any  # None where the group has no such setting
    name: str | None  # as the optimizer knows it (torch records it when it is built from named_parameters())


class Inventory:
    """Hold a model's parameters by name and the entries of its optimizers.

    Args:
        setup: The model and its optimizers.
        ignore: Patterns of parameter names that no rule looks at.
    """

    def __init__(self, setup: TrainingSetup, ignore: Sequence[str]) -> None:
        self.model: nn.Module = setup.model
        self.optimizers: dict[str, Any] = setup.optimizers
        self.named: dict[str, nn.Parameter] = parameter_names(self.model)
        self.own_ids = {id(parameter) for parameter in self.named.values()}
        self.ignored_ids = self.match(ignore, argument="ignore")
        self.entries = list(_entries(setup.optimizers))
        self.covered_ids = {id(entry.tensor) for entry in self.entries} & self.own_ids

    def match(self, patterns: Sequence[str], *, argument: str) -> set[int]:
        """Return the ids of the parameters that patterns name, by any of a tied parameter's names."""
        every_name = {**unregistered_tensors(self.model), **parameter_names(self.model, remove_duplicate=False)}
        return {id(every_name[name]) for name in match_names(every_name, patterns, argument=argument)}

    @cached_property
    def watched(self) -> dict[str, nn.Parameter]:
        """The parameters that are not ignored."""
        return {name: parameter for name, parameter in self.named.items() if id(parameter) not in self.ignored_ids}

    @cached_property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The watched parameters that are trained."""
        return {name: parameter for name, parameter in self.watched.items() if parameter.requires_grad}

    @cached_property
    def missing(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that are in no optimizer."""
        return {name: parameter for name, parameter in self.trainable.items() if id(parameter) not in self.covered_ids}

    @cached_property
    def unregistered(self) -> dict[str, torch.Tensor]:
        """What the model trains out of torch's sight, without what an optimizer holds and what is ignored."""
        known = self.ignored_ids | {id(entry.tensor) for entry in self.entries}
        return {name: tensor for name, tensor in unregistered_tensors(self.model).items() if id(tensor) not in known}

    @cached_property
    def foreign(self) -> list[Entry]:
        """Entries that are no parameters of the model, one per tensor."""
        first = {id(entry.tensor): entry for entry in reversed(self.entries)}
        return [entry for entry in self.entries if entry is first[id(entry.tensor)] and not self.owns(entry)]

    @cached_property
    def name_of(self) -> dict[int, str]:
        """The model's parameters' names by id."""
        return {id(parameter): name for name, parameter in self.named.items()}

    @cached_property
    def position(self) -> dict[str, int]:
        """Where in the model's order a parameter's name stands."""
        return {name: index for index, name in enumerate(self.named)}

    def owns(self, entry: Entry) -> bool:
        """Tell whether an entry is a parameter of the model."""
        return id(entry.tensor) in self.own_ids

    def group(self, names: Iterable[str]) -> str:
        """Write parameter names shortly."""
        return group_names(names, self.named)

    def label(self, optimizer: str) -> str:
        """Name an optimizer in a sentence."""
        return "the optimizer" if len(self.optimizers) == 1 else f"optimizer {optimizer!r}"

    def labels(self, names: Iterable[str]) -> str:
        """Name several optimizers in a sentence."""
        names = list(names)
        return self.label(names[0]) if len(names) == 1 else f"optimizers {', '.join(map(repr, names))}"


def _entries(optimizers: dict[str, Any]) -> Iterable[Entry]:
    for optimizer_name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or []
            for position, tensor in enumerate(group["params"]):
                name = names[position] if position < len(names) else None
                yield Entry(tensor, optimizer_name, index, group.get("weight_decay"), name)


def as_code(name: str) -> str:
    """Write a module's or parameter's name as an expression: ``enc.0.weight`` as ``model.enc[0].weight``."""
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".") if part)


def parametrized_weight(name: str, named: dict[str, nn.Parameter]) -> str | None:
    """Return the weight that a parametrization's parameter stands for."""
    module, marker, rest = name.rpartition(".parametrizations.")
    if marker or name.startswith("parametrizations."):
        rest = rest if marker else name.removeprefix("parametrizations.")
        attribute, _, original = rest.partition(".")
        return f"{module}.{attribute}".lstrip(".") if original.startswith("original") else None
    for ending, twin in (("_g", "_v"), ("_v", "_g")):  # torch.nn.utils.weight_norm, the older one
        if name.endswith(ending) and name.removesuffix(ending) + twin in named:
            return name.removesuffix(ending)
    return None


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return a tensor's shape; None for a lazy parameter before its first forward pass."""
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def shapes_text(tensors: Iterable[torch.Tensor]) -> str:
    """Write the shapes of tensors, the first few of many."""
    shapes = ["not yet known" if shape is None else str(shape) for shape in map(shape_of, tensors)]
    more = f", and {len(shapes) - MAX_SHAPES} more" if len(shapes) > MAX_SHAPES else ""
    return f"{'shape' if len(shapes) == 1 else 'shapes'} {', '.join(shapes[:MAX_SHAPES])}{more}"


def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def verb(number: int, singular: str, plural: str) -> str:
    """Choose the verb's form for a number of things."""
    return singular if number == 1 else plural
