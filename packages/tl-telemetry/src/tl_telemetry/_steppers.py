"""The optimizers that step in a run, under the names by which a person knows them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tl_core import TrainingSetup
from tl_telemetry._figures import Figures, Span
from tl_telemetry._gradients import Gradients
from tl_telemetry._tensors import Tensors

# Optimizers followed that are not in the setup and hold nothing of it: enough to see one over a copy of the model.
MAX_STRANGERS = 4


class Stepper:
    """One optimizer: its name, the indices of its parameters, and how often it stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Tensors, name: str) -> None:
        self.name = name
        self.kind = type(optimizer).__name__
        self.indices: tuple[int, ...] = ()
        self.index_set: frozenset[int] = frozenset()
        self.count = 0
        self.is_new = False
        self._tensors = tensors
        self._shape: tuple[int, ...] = ()
        self.take(optimizer)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Stand for this optimizer from now on, and keep it alive until it is let go."""
        self._kept: torch.optim.Optimizer | None = optimizer
        try:
            self._optimizer: Callable[[], torch.optim.Optimizer | None] = weakref.ref(optimizer)
        except TypeError:  # an object of a class with __slots__
            self._optimizer = lambda: optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None once it is gone."""
        return self._optimizer()

    def let_go(self) -> bool:
        """Keep the optimizer and its state alive no longer; tells whether nobody else does."""
        self._kept = None
        return self.optimizer is None

    def follow_new(self, gradients: Gradients | None = None) -> bool:
        """Read the parameter groups if they changed; tells whether they hold parameters that were not followed yet."""
        groups = self._groups()
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

    def num_evaluations(self) -> int:
        """Return how often the optimizer evaluated closures so far; 0 where it does not count that (LBFGS does)."""
        states = getattr(self.optimizer, "state", {}).values()
        counts = (state.get("func_evals", 0) for state in states if isinstance(state, dict))
        return sum(count for count in counts if isinstance(count, int))

    def lrs(self, figures: Figures) -> tuple[float | Span, ...]:
        """Return each group's learning rate as it is now; a tensor's is read later."""
        return tuple(
            figures.add([lr.detach().clone().reshape(())]) if isinstance(lr, Tensor) else float(lr)
            # there may be none, or None where the optimizer finds its own (Adafactor)
            for lr in (float("nan") if group.get("lr") is None else group["lr"] for group in self._groups())
        )

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer.param_groups


class Steppers:
    """Finds the stepper of an optimizer: one of the setup's, or one that was met when it stepped."""

    def __init__(self, setup: TrainingSetup, tensors: Tensors) -> None:
        self._setup = setup
        self._tensors = tensors
        self._all: list[Stepper] = []
        self._known: dict[int, Stepper] = {}
        self._num_strangers = 0
        self.num_unfollowed = 0  # updates by strangers beyond the first ones

    def __iter__(self) -> Iterator[Stepper]:
        return iter(self._all)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._find(optimizer) is not None

    def _find(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        stepper = self._known.get(id(optimizer))
        # the id of one that is gone may be taken by another one
        return stepper if stepper is not None and stepper.optimizer is optimizer else None

    def _keep(self, stepper: Stepper, optimizer: torch.optim.Optimizer) -> Stepper:
        """Take in a stepper, or let one whose optimizer is gone stand for its successor over the same parameters."""
        for earlier in self._all:
            alike = earlier.kind == stepper.kind and earlier.index_set == stepper.index_set
            if alike and not self._in_setup(earlier) and earlier.let_go():
                earlier.take(optimizer)
                stepper = earlier
                break
        else:
            self._all.append(stepper)
        self._known[id(optimizer)] = stepper
        return stepper

    def _in_setup(self, stepper: Stepper) -> bool:
        return any(stepper.optimizer is optimizer for optimizer in self._setup.optimizers.values())

    def refresh(self) -> None:
        """Take in the setup's optimizers: the dict may have been changed during the run."""
        for name, optimizer in self._setup.optimizers.items():
            stepper = self._find(optimizer)
            if stepper is None:
                stepper = Stepper(optimizer, self._tensors, name)
                stepper.follow_new()
                stepper = self._keep(stepper, optimizer)
            stepper.name = name
            stepper.follow_new()

    def of(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return the stepper of an optimizer that begins to step; None for one that shares nothing with the setup."""
        stepper = self._find(optimizer)
        if stepper is None:
            self.refresh()
            stepper = self._find(optimizer)
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
                self.num_unfollowed += 1
                return None
            self._num_strangers += 1
        stepper = Stepper(optimizer, self._tensors, "")
        stepper.follow_new()
        stepper = self._keep(stepper, optimizer)
        if stepper.name:
            return stepper
        alike = [other for other in self._all if other.kind == stepper.kind and not self._in_setup(other)]
        stepper.name = f"{stepper.kind} that is not in the setup" + (f" ({len(alike)})" if len(alike) > 1 else "")
        for name, other in self._setup.optimizers.items():
            # the base optimizer that a wrapper in the setup holds (SAM, Lookahead) goes by the wrapper's name
            if stepper.index_set <= self.indices_of(other) and holds(other, optimizer):
                stepper.name = name
        return stepper

    def is_stranger(self, stepper: Stepper) -> bool:
        """Tell whether an optimizer is not in the setup, and holds nothing of the model or of one that is."""
        if self._in_setup(stepper) or any(self._tensors.entries[i].in_model for i in stepper.indices):
            return False
        return all(stepper.index_set.isdisjoint(self.indices_of(o)) for o in self._setup.optimizers.values())

    def indices_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        stepper = self._find(optimizer)
        return frozenset() if stepper is None else stepper.index_set

    def lrs(self, name: str, figures: Figures) -> tuple[float | Span, ...]:
        """Return the learning rates of one of the setup's optimizers as they are now."""
        optimizer = self._setup.optimizers[name]
        stepper = self._find(optimizer)
        if stepper is None:
            self.refresh()
            stepper = self._known[id(optimizer)]
        return stepper.lrs(figures)


def holds(outer: object, inner: object) -> bool:
    """Tell whether an attribute of an object is another one: a wrapper and what it wraps."""
    return any(value is inner for value in getattr(outer, "__dict__", {}).values())
