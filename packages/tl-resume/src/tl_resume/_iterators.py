"""Iterators of loaders, whose position is a part of the loader's state."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tl_core import TrainingSetup


def is_stateful(value: Any) -> bool:
    """Tell whether an object has ``state_dict()`` and ``load_state_dict()``."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_loader_iterator(value: Any) -> bool:
    """Tell whether a value is the iterator of a DataLoader."""
    return isinstance(value, _BaseDataLoaderIter)


def stateful_loaders(setup: TrainingSetup) -> dict[str, Any]:
    """List the DataLoaders with a state, torchdata's, among the entries of ``setup.state`` and the attributes."""
    named = {f"state[{name!r}]": value for name, value in setup.state.items()}
    named |= {f"setup.{name}": value for name, value in vars(setup).items()}
    return {place: value for place, value in named.items() if isinstance(value, DataLoader) and is_stateful(value)}


def made_iterators(setup: TrainingSetup) -> dict[str, dict[str, str]]:
    """Find the iterators of a setup that a stateful loader of the setup has made, and still holds.

    torchdata's ``StatefulDataLoader`` tells the position of its latest iterator in its own ``state_dict()``. Only an
    iterator that is made after the loader's ``load_state_dict()`` begins there.

    Returns:
        For ``"state"`` and ``"attributes"``, where there are such: the place of the loader by the iterator's name.
    """
    held = {
        id(member): place
        for place, loader in stateful_loaders(setup).items()
        for member in vars(loader).values()
        if is_loader_iterator(member)
    }
    found = {
        section: {name: held[id(value)] for name, value in members.items() if id(value) in held}
        for section, members in (("state", setup.state), ("attributes", vars(setup)))
    }
    return {section: names for section, names in found.items() if names}


def own_entries(setup: TrainingSetup) -> dict[str, Any]:
    """List the entries of ``setup.state``, without iterators whose position is in the state of their loader."""
    made = made_iterators(setup).get("state", {})
    return {name: value for name, value in setup.state.items() if name not in made}
