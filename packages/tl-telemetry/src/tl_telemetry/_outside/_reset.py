"""What a step uses outside of the setup, which survives from run to run in one process: set back before each run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tl_telemetry._capture import StateCapture, StateDifference, capture_outside, put_back
from tl_telemetry._capture._walk import Keep, keep_in_memory
from tl_telemetry._outside._reach import OWN_OBJECT, Place, caches, places

_WHOLE = object()


class Outside:
    """The globals, closure cells, defaults and own objects that functions use, by name.

    What they hold is captured when this is made; ``reset`` sets it back, so that a loop which runs several times in one
    process begins each time as it would in a new one.

    Args:
        functions: the functions of the loop: its step, save and load, and what ``setup_functions`` lists.
        keep: keeps a tensor's content, as for ``capture_state``; the default is a copy in memory, on the CPU.

    Example:
        >>> losses = []
        >>> def step(setup, batch):
        ...     losses.append(float(batch.sum()))
        >>> outside = Outside([step])
        >>> step(None, torch.ones(2))
        >>> outside.reset()
        >>> losses
        []
    """

    def __init__(self, functions: Iterable[Callable[..., Any]], *, keep: Keep = keep_in_memory) -> None:
        self._keep = keep
        functions = list(functions)
        self._caches = caches(functions)
        self._places: dict[str, Place] = {}
        for place in places(functions):
            name, number = place.name, 2
            while name in self._places:
                name, number = f"{place.name} ({number})", number + 1
            self._places[name] = place
        self._initial = self.capture()
        self._saved: set[tuple[str, Any]] = set()

    def values(self) -> dict[str, Any]:
        """Return what lies at each place now; a place without a value is left out."""
        values = {}
        for name, place in self._places.items():
            try:
                values[name] = place.get()
            except LookupError:
                continue
        return values

    def access(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
        """Return how to get and set each place."""
        return {name: (place.get, place.set) for name, place in self._places.items()}

    def capture(self) -> StateCapture:
        """Capture what lies at the places now."""
        return capture_outside(self.values(), keep=self._keep)

    def saved(self, differences: Iterable[StateDifference]) -> None:
        """Remember what ``save`` wrote into these places: a checkpoint in memory, which outlives the process's end.

        Args:
            differences: what differs between a capture before and one after saving.
        """
        for difference in differences:
            if difference.piece.kind == "outside":
                self._saved.add((difference.piece.name, difference.path[0] if difference.path else _WHOLE))

    def reset(self) -> None:
        """Set every place back to what it held when this was made, as a new process would find it."""
        for cache in self._caches:  # what a new process would compute anew
            cache.cache_clear()
        detached = list(self._detach())
        skipped = {name for name, key in self._saved if key is _WHOLE}
        there = self.values()
        for name, place in self._places.items():
            if name in there and not any(piece.name == name for piece in self._initial.pieces) and name not in skipped:
                place.delete()
        pieces = [piece for piece in self._initial.pieces if piece.name not in skipped]
        put_back(self._initial, None, pieces, outside=self.access())
        for attach in detached:
            attach()

    def _detach(self) -> Iterable[Callable[[], None]]:
        """Take what ``save`` wrote out of its containers, so that setting those back does not reach it."""
        values = self.values()
        for name, key in self._saved:
            holder = values.get(name)
            if isinstance(holder, dict) and key in holder:
                yield partial(operator.setitem, holder, key, holder.pop(key))
            elif isinstance(key, str) and key in getattr(holder, "__dict__", {}):
                yield partial(object.__setattr__, holder, key, vars(holder)[key])
                object.__delattr__(holder, key)


def own_object(name: str) -> tuple[str, str] | None:
    """Take the name of an own object's place apart, as ``step's own object (Trainer)``.

    Args:
        name: the name of a place, as ``Outside.values`` gives it.

    Returns:
        The name of the function that is bound to the object, and the object's type; None for every other place.
    """
    function, parted, kind = name.partition(OWN_OBJECT)
    return (function, kind.removesuffix(")")) if parted else None
