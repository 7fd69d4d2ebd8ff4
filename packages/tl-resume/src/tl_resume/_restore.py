"""Putting a training state from a file into a setup."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume._fit import is_lazy, misfits
from tl_resume._format import StateFile, StateFileError, TensorEntry
from tl_resume._generators import (
    check_generator,
    check_global_states,
    find_generators,
    global_states,
    is_generator,
    set_generator_state,
    set_global_states,
)
from tl_resume._iterators import is_stateful, made_iterators, own_entries, stateful_loaders
from tl_resume._model_names import attributes, stray_tensors, trained_tensors
from tl_resume._restore_module import ModuleRestorer, read_like
from tl_resume._restore_optimizer import restore_hyperparameters, restore_optimizer
from tl_resume._state import has_torch_layout, setup_modules
from tl_resume._undo import Journal


def restore(setup: TrainingSetup, file: StateFile, advance: Callable[[int], None] = lambda nbytes: None) -> None:
    """Restore a setup from a file.

    Args:
        setup: The setup.
        file: The file.
        advance: Called with numbers of bytes that have been checked; they add up to those of the file.

    Raises:
        StateFileError: A digest does not match; the setup is as it was.
        ValueError: The file does not fit the setup, or an object could not be restored; the setup is as it was.
    """
    saved = file.skeleton()
    _check_digests(file, saved, advance)
    rng, generators = _check(setup, file, saved)
    journal, before = Journal(), global_states()
    restorer = _Restorer(setup, file, saved, journal)
    try:
        restorer.restore_fallible(advance)
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
    restorer.finish()
    live = find_generators(setup)
    for place, state in generators.items():
        if place in live:
            set_generator_state(live[place], state)
    set_global_states(rng)


# Their tensors are made anew, and only checked while they are read.
_READ_ONCE = ("optimizers", "gradients")


def _check_digests(file: StateFile, saved: Any, advance: Callable[[int], None]) -> None:
    """Check the tensors that are copied into others, from where there is no way back."""
    later: set[str] = set()
    if isinstance(saved, dict) and set(_READ_ONCE) <= set(saved):
        later = _stored_names([saved[section] for section in _READ_ONCE])
        later -= _stored_names([value for section, value in saved.items() if section not in _READ_ONCE])
    damaged = file.damaged([name for name in file.tensors if name not in later], advance=advance)
    if damaged:
        shown = ", ".join(map(repr, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        raise StateFileError(f"{file.path} is damaged: the bytes of {shown} are not those that were written")


def _stored_names(value: Any) -> set[str]:
    if isinstance(value, TensorEntry):
        return {value.name}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return set().union(*map(_stored_names, inner))


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
        # before anything is loaded: then a loader forgets the iterator that it has made
        self._own = {"state": own_entries(setup), "attributes": attributes(setup)}
        self._made = [made_iterators(setup), saved["iterators"]]

    def restore_fallible(self, advance: Callable[[int], None]) -> None:
        """Restore what a person's code may refuse; the journal knows the way back."""
        setup = self._setup
        # optimizers before schedulers, which may look at them
        for name, optimizer in setup.optimizers.items():
            self._stateful(optimizer, ("optimizers", name), f"optimizers[{name!r}]")
            advance(self._nbytes(self._saved["optimizers"][name]))
        for name, scheduler in setup.schedulers.items():
            self._stateful(scheduler, ("schedulers", name), f"schedulers[{name!r}]")
        if setup.scaler is not None and self._saved["scaler"]:
            self._journal.place = "the scaler"
            self._journal.load(setup.scaler, self._file.part("scaler", verify=False))
        self._module(setup.model, ("model",), "the model")
        self._entries("state", "state[{!r}]")
        self._entries("attributes", "setup.{}")
        self._iterators()
        self._gradients()
        advance(self._nbytes(self._saved["gradients"]))

    def _nbytes(self, saved: Any) -> int:
        return sum(self._file.tensors[name].nbytes for name in _stored_names(saved))

    def _entries(self, section: str, write: str) -> None:
        live = self._own[section]
        for name in self._saved[section]:
            place = write.format(name)
            value = live.get(name)
            if name in live and is_stateful(value):
                self._stateful(value, (section, name), place)
            elif not is_generator(value):
                self._plain(section, name, value, place)

    def _stateful(self, value: Any, keys: tuple[str, str], place: str) -> None:
        if isinstance(value, nn.Module):
            self._module(value, keys, place)
            return
        self._journal.place = place
        saved = self._saved[keys[0]][keys[1]]
        if keys[0] == "optimizers" or isinstance(value, torch.optim.Optimizer):
            restore_optimizer(value, keys, saved, self._file, self._names, self._journal)
        else:
            self._journal.load(value, read_like(self._file, keys, saved, value.state_dict()))

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

    def _plain(self, section: str, name: str, live: Any, place: str) -> None:
        self._journal.place = place
        self._set(section, name, self._journal.refill(live, self._file.part(section, name, verify=False)))

    def _set(self, section: str, name: str, value: Any) -> None:
        members = self._setup.state if section == "state" else vars(self._setup)
        if name in members:
            self._journal.add(partial(members.__setitem__, name, members[name]))
        else:
            self._journal.add(lambda: members.pop(name))
        members[name] = value

    def _iterators(self) -> None:
        """Let loaders make their iterators anew, which now begin where the loader was saved."""
        loaders, anew = stateful_loaders(self._setup), {}
        for section in ("state", "attributes"):
            made = {name: place for known in self._made for name, place in known.get(section, {}).items()}
            for name, place in made.items():
                if name in self._saved[section]:
                    continue  # it was something else when the file was saved
                self._journal.place = place
                if place not in anew:
                    anew[place] = iter(loaders[place])
                self._set(section, name, anew[place])

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
        gradient = self._file.part("gradients", name, device=lambda entry: device)
        assert isinstance(gradient, torch.Tensor)
        return gradient

    def finish(self) -> None:
        """Restore what cannot fail."""
        setup, saved = self._setup, self._saved
        lazy = [name for name, tensor in self._trained.items() if is_lazy(tensor)]
        for restorer in self._modules:
            restorer.finish()
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
