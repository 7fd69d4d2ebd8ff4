"""Putting a training state from a file into a setup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume._fit import is_lazy, misfits
from tl_resume._format import StateFile, StateFileError
from tl_resume._generators import (
    check_generator,
    check_global_states,
    find_generators,
    global_states,
    is_generator,
    set_generator_state,
    set_global_states,
)
from tl_resume._model_names import attributes, stray_tensors, trained_tensors
from tl_resume._restore_module import ModuleRestorer
from tl_resume._restore_optimizer import restore_hyperparameters, restore_optimizer
from tl_resume._state import has_torch_layout, is_stateful, setup_modules
from tl_resume._undo import Journal


def restore(setup: TrainingSetup, file: StateFile, advance: Callable[[int], None] = lambda nbytes: None) -> None:
    """Restore a setup from a file whose digests have been checked.

    Args:
        setup: The setup.
        file: The file.
        advance: Called with the bytes of each tensor of the model that has been copied.

    Raises:
        ValueError: The file does not fit the setup, or an object could not be restored; the setup is as it was.
    """
    saved = file.skeleton()
    rng, generators = _check(setup, file, saved)
    journal, before = Journal(), global_states()
    restorer = _Restorer(setup, file, saved, journal)
    try:
        restorer.restore_fallible()
    except BaseException as error:
        stuck = journal.roll_back()
        set_global_states(before)
        # a failing disk or a full memory is no fault of the file's or the object's
        if not isinstance(error, Exception) or isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)):
            raise
        if isinstance(error, StateFileError):
            raise
        left = f"; these could not be put back: {', '.join(stuck)}" if stuck else "; the setup is as it was"
        text = str(error).splitlines()[0][:200] if str(error) else ""
        raise ValueError(
            f"{file.path}: {journal.place} could not be restored ({type(error).__name__}: {text}){left}"
        ) from error
    restorer.finish(advance)
    live = find_generators(setup)
    for place, state in generators.items():
        if place in live:
            set_generator_state(live[place], state)
    set_global_states(rng)


def _check(setup: TrainingSetup, file: StateFile, saved: Any) -> tuple[Any, dict[str, Any]]:
    lines = misfits(setup, saved)
    rng: Any = None
    generators: dict[str, Any] = {}
    if not lines:
        rng, generators = file.part("rng", verify=False), file.part("generators", verify=False)
        lines = check_global_states(rng)
        live = find_generators(setup)
        for place, state in generators.items():
            if place in live:
                lines += check_generator(f"the generator {place}", live[place], state)
    if lines:
        raise ValueError("\n  ".join([f"{file.path} does not fit the setup, which is as it was:", *lines]))
    return rng, generators


class _Restorer:
    def __init__(self, setup: TrainingSetup, file: StateFile, saved: Any, journal: Journal) -> None:
        self._setup, self._file, self._saved, self._journal = setup, file, saved, journal
        self._modules: list[ModuleRestorer] = []
        self._trained = trained_tensors(setup)
        self._names = {id(tensor): name for name, tensor in self._trained.items()}

    def restore_fallible(self) -> None:
        """Restore what a person's code may refuse; the journal knows the way back."""
        setup = self._setup
        # optimizers before schedulers, which may look at them
        for name, optimizer in setup.optimizers.items():
            self._stateful(optimizer, ("optimizers", name), f"optimizers[{name!r}]")
        for name, scheduler in setup.schedulers.items():
            self._stateful(scheduler, ("schedulers", name), f"schedulers[{name!r}]")
        if setup.scaler is not None and self._saved["scaler"]:
            self._journal.place = "the scaler"
            self._journal.load(setup.scaler, self._file.part("scaler", verify=False))
        self._module(setup.model, ("model",), "the model")
        self._entries(setup.state, "state", "state[{!r}]")
        self._entries(attributes(setup), "attributes", "setup.{}")
        self._gradients()

    def _entries(self, live: dict[str, Any], section: str, write: str) -> None:
        for name in self._saved[section]:
            place = write.format(name)
            value = live.get(name)
            if name in live and is_stateful(value):
                self._stateful(value, (section, name), place)
            elif not is_generator(value):
                self._plain(section, name, value, name in live, place)

    def _stateful(self, value: Any, keys: tuple[str, str], place: str) -> None:
        if isinstance(value, nn.Module):
            self._module(value, keys, place)
            return
        self._journal.place = place
        saved = self._saved[keys[0]][keys[1]]
        if keys[0] == "optimizers" or isinstance(value, torch.optim.Optimizer):
            restore_optimizer(value, keys, saved, self._file, self._names, self._journal)
        else:
            self._journal.load(value, self._file.part(*keys, verify=False))

    def _module(self, module: nn.Module, keys: tuple[str, ...], place: str) -> None:
        self._journal.place = place
        if not has_torch_layout(module):
            self._journal.load(module, self._file.part(*keys, verify=False))
            return
        saved = self._saved
        for key in keys:
            saved = saved[key]
        restorer = ModuleRestorer(module, keys, saved, self._file)
        restorer.try_loading(self._journal)
        self._modules.append(restorer)

    def _plain(self, section: str, name: str, live: Any, there: bool, place: str) -> None:
        self._journal.place = place
        value = self._journal.refill(live, self._file.part(section, name, verify=False))
        members = self._setup.state if section == "state" else vars(self._setup)
        if there:
            self._journal.add(lambda: members.__setitem__(name, live))
        else:
            self._journal.add(lambda: members.pop(name))
        members[name] = value

    def _gradients(self) -> None:
        for name, tensor in self._trained.items():
            self._journal.place = f"the gradient of {name}"
            before = tensor.grad
            self._journal.add(partial(setattr, tensor, "grad", before))
            if name not in self._saved["gradients"]:
                tensor.grad = None
            elif not is_lazy(tensor):
                tensor.grad = self._read_gradient(name)

    def _read_gradient(self, name: str) -> torch.Tensor:
        device = self._trained[name].device
        gradient = self._file.part("gradients", name, device=lambda entry: device, verify=False)
        assert isinstance(gradient, torch.Tensor)
        return gradient

    def finish(self, advance: Callable[[int], None]) -> None:
        """Restore what cannot fail."""
        setup, saved = self._setup, self._saved
        lazy = [name for name, tensor in self._trained.items() if is_lazy(tensor)]
        for restorer in self._modules:
            restorer.finish(advance)
        for name in lazy:
            if name in saved["gradients"]:
                self._trained[name].grad = self._read_gradient(name)
        for name, tensor in stray_tensors(setup).items():
            self._file.copy_into(saved["parameters"][name], tensor)
        for name, optimizer in setup.optimizers.items():
            restore_hyperparameters(optimizer, ("optimizers", name), saved["optimizers"][name], self._file)
        for name, modules in setup_modules(setup).items():
            for module in modules:
                module.training = saved["modes"][name]
        setup.step_index = saved["step_index"]
