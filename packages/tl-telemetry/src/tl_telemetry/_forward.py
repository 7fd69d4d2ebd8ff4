"""Which modules ran, with which modes: seen by global forward hooks, which leave as soon as all is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry._tensors import kept_aside, other_modules, using_modules

RAN_WITH_GRAD = 1
RAN_WITHOUT_GRAD = 2
RAN_IN_TRAINING = 4
# ran with grad mode off inside of a module that ran with grad mode on
CUT_INSIDE = 8
# a compiled or scripted module ran: what happened below it cannot be seen
OPAQUE = 16
# what flowed in had a history with something trainable in it
INPUT_TRAINS = 32

# Steps in which every forward pass is looked at; afterwards only modules not seen yet keep the hooks in place,
# and only every LATER_EVERY-th step.
FIRST_STEPS = 4


class Forward:
    """The flags of each followed module, by id."""

    def __init__(self) -> None:
        self.flags: dict[int, int] = {}
        self._active: list[tuple[nn.Module, bool]] = []
        self._awaited: set[int] = set()
        self._steps = 0
        self.sees_compiled = False  # where torch is told to run compiled code as it was written
        self.autocast: set[torch.dtype] = set()  # of forward passes in the first steps that a backward pass followed
        self._autocast: set[torch.dtype] = set()  # of those that none followed yet
        self._device_types: set[str] = set()
        self._aside: dict[int, nn.Module] = {}  # by id, what a model that has the step as a method keeps aside

    def follow(self, setup: TrainingSetup) -> None:
        """Follow every module of the setup (the model's and the others')."""
        if hasattr(setup.model, "training_step"):
            self._aside = {id(part): setup.model for part in kept_aside(setup.model)}
        roots = [setup.model, *(module for _, module in other_modules(setup))]
        kinds = {parameter.device.type for root in roots for parameter in root.parameters()}
        self._device_types = {kind for kind in kinds if torch.amp.is_autocast_available(kind)}
        for root in roots:
            users = using_modules(root)
            for module in root.modules():
                if id(module) not in self.flags:
                    self.flags[id(module)] = 0
                    if any(p is not None for p in module._parameters.values()):
                        self._awaited.add(id(users[id(module)]))

    def begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """Note the modes in which a module runs.

        Returns:
            Whether it is a stranger with parameters that runs, with grad mode on, inside of a followed module, or in
            the step that is a method of the model which keeps it: one that the setup keeps out of torch's sight.
        """
        flags = self.flags.get(id(module))
        grad = torch.is_grad_enabled()
        if flags is None:
            return grad and bool(module._parameters) and (bool(self._active) or id(module) in self._aside)
        flags |= RAN_WITH_GRAD if grad else RAN_WITHOUT_GRAD
        if module.training:
            flags |= RAN_IN_TRAINING
        if not grad and self._active and self._active[-1][1]:
            flags |= CUT_INSIDE
        self.flags[id(module)] = flags
        self._awaited.discard(id(module))
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            self.flags[id(module)] |= INPUT_TRAINS
        if grad and self._steps < FIRST_STEPS:
            for kind in self._device_types:
                if torch.is_autocast_enabled(kind):
                    self._autocast.add(torch.get_autocast_dtype(kind))
        self._active.append((module, grad))
        if isinstance(module, torch.jit.ScriptModule) or (hasattr(module, "_orig_mod") and not self.sees_compiled):
            self._below(module)
        return False

    def around(self, module: nn.Module) -> nn.Module:
        """Return the followed module that runs now, or whose step does."""
        return self._active[-1][0] if self._active else self._aside[id(module)]

    def _below(self, module: nn.Module) -> None:
        for child in module.modules():
            self.flags[id(child)] = self.flags.get(id(child), 0) | OPAQUE
            self._awaited.discard(id(child))

    def ended(self, module: nn.Module) -> bool:
        """Forget a module that has run; tells whether it ran inside of no other one."""
        # a forward pass that raised left its modules on the stack: drop them with the one that did end
        for depth in range(len(self._active) - 1, -1, -1):
            if self._active[depth][0] is module:
                del self._active[depth:]
                return depth == 0
        return False

    def backward_begins(self) -> None:
        """Note that a backward pass followed the forward passes of this step so far."""
        if self._autocast:
            self.autocast |= self._autocast
            self._autocast = set()

    def close_step(self) -> bool:
        """Tell whether the hooks may leave: all modules with parameters have been seen."""
        self._active.clear()
        self._autocast.clear()
        self._steps += 1
        return self._steps >= FIRST_STEPS and not self._awaited
