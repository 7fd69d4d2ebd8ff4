"""Changes that can be taken back, for a restoring that fails halfway."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Journal:
    """What has been changed, and how to change it back.

    Attributes:
        place: What is being restored, for messages.
    """

    def __init__(self) -> None:
        self.place = "the setup"
        self._undo: list[tuple[str, Callable[[], Any]]] = []

    def add(self, undo: Callable[[], Any]) -> None:
        """Remember how to take back what is about to be done."""
        self._undo.append((self.place, undo))

    def roll_back(self) -> list[str]:
        """Take everything back, the last change first.

        Returns:
            The places that could not be put back: their own ``load_state_dict`` raised again.
        """
        stuck = []
        for place, undo in reversed(self._undo):
            try:
                undo()
            except Exception:  # noqa: BLE001  the person's load_state_dict may raise anything; the others must follow
                stuck.append(place)
        return stuck

    def load(self, target: Any, state: Any) -> None:
        """Call ``target.load_state_dict(state)``."""
        before = _copy(target)
        attributes = getattr(target, "__dict__", None)
        if attributes is not None:
            # A load_state_dict that updates __dict__, as those of schedulers do, sets whatever the file names. What
            # state_dict() tells of is put back by load_state_dict(), which is called first.
            own = {
                name: value for name, value in attributes.items() if not isinstance(before, dict) or name not in before
            }
            told = set(attributes) - set(own)
            self.add(lambda: _put_back(attributes, own, told))
        if before is not None:
            self.add(lambda: target.load_state_dict(before))
        target.load_state_dict(state)

    def refill(self, live: Any, saved: Any) -> Any:
        """Bring plain data to what was saved, in the same containers and tensors, for others may hold them too.

        Returns:
            The object that now has the saved value: the live one where it could be refilled.
        """
        if type(live) is not type(saved) and not isinstance(live, Tensor):
            return saved
        if isinstance(live, Tensor):
            return self._refill_tensor(live, saved)
        if isinstance(live, (dict, OrderedDict, Counter, defaultdict)):
            old = dict(live)
            self.add(lambda: _set_items(live, old))
            _set_items(live, {key: self.refill(live.get(key), item) for key, item in saved.items()})
            return live
        if isinstance(live, list):
            before = list(live)
            self.add(lambda: live.__setitem__(slice(None), before))
            same = len(live) == len(saved)
            live[:] = [self.refill(*pair) for pair in zip(live, saved, strict=True)] if same else saved
            return live
        if isinstance(live, set) or (isinstance(live, deque) and live.maxlen == saved.maxlen):
            members = list(live)
            self.add(lambda: _set_members(live, members))
            _set_members(live, saved)
            return live
        numpy = sys.modules.get("numpy")
        alike = numpy is not None and isinstance(live, numpy.ndarray)
        if alike and live.shape == saved.shape and live.dtype == saved.dtype and live.flags.writeable:
            array = live.copy()
            self.add(lambda: live.__setitem__(..., array))
            live[...] = saved
            return live
        return saved

    def _refill_tensor(self, live: Tensor, saved: Any) -> Any:
        plain = isinstance(saved, Tensor) and live.layout is torch.strided and saved.layout is torch.strided
        if not plain or live.shape != saved.shape or live.dtype != saved.dtype:
            return saved
        target = live.detach()
        before = target.to("cpu", copy=True)  # a second copy of all that there is may be too much for a device
        self.add(lambda: target.copy_(before))
        target.copy_(saved)
        return live


def _copy(target: Any) -> Any:
    """Copy the state of an object: what it may keep as it is given on its device, that of a module on the CPU."""
    state = target.state_dict()
    try:
        if isinstance(target, nn.Module) and isinstance(state, dict):
            copied = copy.copy(state)  # with the versions of torch's modules
            copied.update({name: _on_cpu(value) for name, value in state.items()})
            return copied
        return copy.deepcopy(state)
    except Exception:  # noqa: BLE001  what cannot be copied cannot be put back; it may still load well
        return None


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back(attributes: dict[str, Any], own: dict[str, Any], told: set[str]) -> None:
    for name in set(attributes) - set(own) - told:
        del attributes[name]
    attributes.update(own)


def _set_items(target: Any, items: dict[Any, Any]) -> None:
    target.clear()
    for key, item in items.items():  # update() of a Counter would add
        target[key] = item


def _set_members(target: Any, members: Any) -> None:
    members = list(members)
    target.clear()
    (target.update if isinstance(target, set) else target.extend)(members)
