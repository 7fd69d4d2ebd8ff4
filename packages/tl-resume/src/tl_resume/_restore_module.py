"""Putting the state of a module back: its tensors one by one from the file into their places."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tl_resume._fit import is_lazy
from tl_resume._format import StateFile, TensorEntry
from tl_resume._model_names import clean_keys
from tl_resume._undo import Journal


def read_like(file: StateFile, keys: tuple[str, ...], saved: Any, live: Any) -> Any:
    """Read a part of a file, each tensor to the device where the live state has it: it may be kept as it is given.

    Args:
        file: The file.
        keys: Where the part is.
        saved: Its skeleton.
        live: The state that is there now; what it does not have goes to the CPU.
    """
    devices = _devices(live, saved)
    return file.part(*keys, device=lambda entry: devices.get(entry.name, "cpu"), verify=False)


def _devices(live: Any, saved: Any) -> dict[str, torch.device]:
    if isinstance(saved, TensorEntry):
        return {saved.name: live.device} if isinstance(live, Tensor) else {}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(saved, dict) and isinstance(live, Mapping):
        pairs = [(live.get(key), item) for key, item in saved.items()]
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        pairs = list(zip(live, saved, strict=False))
    return {name: device for pair in pairs for name, device in _devices(*pair).items()}


class ModuleRestorer:
    """Restore a module in two goes: what may fail, and what cannot.

    The parameters and buffers themselves are copied into from the file, which cannot fail once it is known to fit. But
    only ``load_state_dict`` runs the hooks and sets the extra state, so it is called with what the module has already,
    which copies nothing.

    Args:
        module: A module that loads as torch's modules do.
        keys: Where in the file its state is.
        saved: The skeleton of that state.
        file: The file.
    """

    def __init__(self, module: nn.Module, keys: tuple[str, ...], saved: dict[str, Any], file: StateFile) -> None:
        self._module, self._keys, self._saved, self._file = module, keys, saved, file
        state = module.state_dict(keep_vars=True)
        self._state = state
        self._keys_of = clean_keys(module, list(state))
        owned = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._in_place = {
            name: state[key]
            for name, key in self._keys_of.items()
            if id(state[key]) in owned and not is_lazy(state[key])
        }
        self._lazy = any(isinstance(value, Tensor) and is_lazy(value) for value in state.values())

    def try_loading(self, journal: Journal) -> None:
        """Call ``load_state_dict`` once with the tensors as they are: extra state and hooks may raise."""
        if self._lazy:
            return  # a materialised parameter cannot be made lazy again
        others = {key: copy.deepcopy(self._state[key]) for key in self._other_keys().values()}
        before = OrderedDict({**self._state, **others})
        journal.add(lambda: self._module.load_state_dict(before))
        self._module.load_state_dict(self._filled())

    def finish(self) -> None:
        """Copy the tensors from the file, and load what is no tensor of the module's own."""
        for name, tensor in self._in_place.items():
            entry = self._saved[name]
            assert isinstance(entry, TensorEntry)
            self._file.copy_into(entry, tensor)
        self._module.load_state_dict(self._filled())

    def _other_keys(self) -> dict[str, str]:
        return {name: key for name, key in self._keys_of.items() if name not in self._in_place}

    def _filled(self) -> OrderedDict[str, Any]:
        loaded = {
            key: read_like(self._file, (*self._keys, name), self._saved[name], self._state[key])
            for name, key in self._other_keys().items()
        }
        filled = OrderedDict({**self._state, **loaded})
        if hasattr(self._state, "_metadata"):  # the versions of the modules
            filled._metadata = self._state._metadata  # type: ignore[attr-defined]
        return filled
