"""The optimizers that step in a run, under the names by which a person knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_core import TrainingSetup

from ._figures import Figures, Span
from ._gradients import Gradients
from ._tensors import Tensors

# Optimizers followed that are not in the setup and hold nothing of it: enough to see one over a copy of the model.
MAX_STRANGERS = 4


class Stepper:
    """One optimizer: its name, the indices of its parameters, and how often it stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Tensors, name: str) -> None:
        self.optimizer = optimizer
        self.name = name
        self.indices: tuple[int, ...] = ()
        self.index_set: frozenset[int] = frozenset()
        self.count = 0
        self.is_new = False
        self._tensors = tensors
        self._shape: tuple[int, ...] = ()

    def follow_new(self, gradients: Gradients | None = None) -> bool:
        """Read the parameter groups if they changed; tells whether they hold parameters that were not followed yet."""
        groups = self.optimizer.param_groups
        shape = tuple(
            part
            for group in groups
            for part in (len(group["params"]), id(group["params"][-1]) if group["params"] else 0)
        )
        if shape == self._shape:
            return False
        self._shape = shape
        before = len(self._tensors)
        self.indices = tuple(
            self._tensors.add(parameter, f"{self.name} group {g} [{j}]")
            for g, group in enumerate(groups)
            for j, parameter in enumerate(group["params"])
        )
        self.index_set = frozenset(self.indices)
        if gradients is not None and len(self._tensors) > len(gradients.tensors):
            gradients.follow(entry.tensor for entry in self._tensors.entries[len(gradients.tensors) :])
        return len(self._tensors) > before

    def lrs(self, figures: Figures) -> tuple[float | Span, ...]:
        """Return each group's learning rate as it is now; a tensor's is read later."""
        return tuple(
            figures.add([lr.detach().clone().reshape(())]) if isinstance(lr, Tensor) else float(lr)
            # there may be none, or None where the optimizer finds its own (Adafactor)
            for lr in (float("nan") if group.get("lr") is None else group["lr"] for group in self.optimizer.param_groups)
        )


class Steppers:
    """Finds the stepper of an optimizer: one of the setup's, or one that was met when it stepped."""

    def __init__(self, setup: TrainingSetup, tensors: Tensors) -> None:
        self._setup = setup
        self._tensors = tensors
        self._known: dict[int, Stepper] = {}
        self._num_strangers = 0

    def __iter__(self) -> Any:
        return iter(self._known.values())

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return id(optimizer) in self._known

    def refresh(self) -> None:
        """Take in the setup's optimizers: the dict may have been changed during the run."""
        for name, optimizer in self._setup.optimizers.items():
            stepper = self._known.get(id(optimizer))
            if stepper is None:
                stepper = self._known[id(optimizer)] = Stepper(optimizer, self._tensors, name)
            stepper.name = name
            stepper.follow_new()

    def of(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return the stepper of an optimizer that begins to step; None for one that shares nothing with the setup."""
        stepper = self._known.get(id(optimizer))
        if stepper is None:
            self.refresh()
            stepper = self._known.get(id(optimizer))
            if stepper is None:
                stepper = self._met(optimizer)
            if stepper is None:
                return None
            stepper.is_new = True
        return stepper

    def _met(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Name an optimizer that is not in the setup."""
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if not any(p in self._tensors.index_of for p in held):
            # one that is made anew in every step (for a perturbation, an inner loop) would fill up memory
            if self._num_strangers == MAX_STRANGERS:
                return None
            self._num_strangers += 1
        kind = type(optimizer).__name__
        mine = set(map(id, self._setup.optimizers.values()))
        number = 1 + sum(type(s.optimizer).__name__ == kind and i not in mine for i, s in self._known.items())
        stepper = Stepper(
            optimizer, self._tensors, f"{kind} that is not in the setup" + (f" ({number})" if number > 1 else "")
        )
        stepper.follow_new()
        for name, other in self._setup.optimizers.items():
            # the base optimizer that a wrapper in the setup holds (SAM, Lookahead) goes by the wrapper's name
            if stepper.index_set <= self._known[id(other)].index_set and _holds(other, optimizer):
                stepper.name = name
        self._known[id(optimizer)] = stepper
        return stepper

    def indices_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        stepper = self._known.get(id(optimizer))
        return frozenset() if stepper is None else stepper.index_set

    def lrs(self, name: str, figures: Figures) -> tuple[float | Span, ...]:
        """Return the learning rates of one of the setup's optimizers as they are now."""
        optimizer = self._setup.optimizers[name]
        stepper = self._known.get(id(optimizer))
        if stepper is None:
            self.refresh()
            stepper = self._known[id(optimizer)]
        return stepper.lrs(figures)


def _holds(outer: object, inner: object) -> bool:
    return any(value is inner for value in getattr(outer, "__dict__", {}).values())
