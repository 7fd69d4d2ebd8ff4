"""Where the content of every gradient came from: filled by which backward passes, used by which update.

torch has no hook for ``zero_grad``; what happened between two acts is read off the gradients themselves. A gradient's
identity and version tell whether it was replaced, cleared or edited since the last look, at the cost of two attribute
reads a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter, eq

import torch
from torch import Tensor

from tl_telemetry._events import BY_HAND, Portion, Source
from tl_telemetry._figures import common_dtype, norms
from tl_telemetry._history import History

# How many gradients stand for all of them where a glance will do: at the end of a step, and of an optimizer's own.
NUM_SAMPLED = 4

_NO_GRADIENT = id(None)
_NO_VERSION = -1

_grad = attrgetter("grad")
_version = attrgetter("_version")


class Gradients:
    """The history of each followed parameter's gradient, indexed like the run's ``Tensors``.

    Loops mostly do the same to all parameters at once. Where that is so, one history serves all of them, and what
    happens next is worked out once.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.everything: tuple[int, ...] = ()  # all indices
        self._histories: list[History] = []
        self._are_alike: bool | None = None  # whether all histories are equal; None while nobody asked
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._dtypes: dict[tuple[int, ...], torch.dtype | None] = {}
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Follow further tensors; a gradient that is already there counts as put there by hand."""
        for tensor in tensors:
            self.tensors.append(tensor)
            self._histories.append(History(() if tensor.grad is None else (BY_HAND,)))
        self._are_alike = None
        self.everything = self.shared(range(len(self.tensors)))
        num_read = len(self._ids)
        added = self.everything[num_read:]
        self._ids += [_NO_GRADIENT] * len(added)
        self._versions += [_NO_VERSION] * len(added)
        self.accept(added)

    def shared(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return one tuple object for equal ones: steps repeat, and records are kept for the whole run."""
        key = tuple(indices)
        return self._shared.setdefault(key, key)

    # -- what is there ------------------------------------------------------------------------------------------

    def parted(self, indices: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Part indices into those that had no gradient at the last look, and those that had one."""
        return self._part(indices, self._ids)

    def grads(self, indices: tuple[int, ...]) -> list[Tensor]:
        """Return the gradients of parameters that have one."""
        if indices == self.everything:
            return list(map(_grad, self.tensors))
        tensors = self.tensors
        return [grad for i in indices if (grad := tensors[i].grad) is not None]

    def dtype(self, indices: tuple[int, ...]) -> torch.dtype | None:
        """Return what the gradients of these parameters most likely all are: their parameters' dtype, if it is one."""
        if indices not in self._dtypes:
            self._dtypes[indices] = common_dtype([self.tensors[i] for i in indices])
        return self._dtypes[indices]

    def norms(self, indices: tuple[int, ...]) -> list[Tensor]:
        """Return the L2 norm of each of these gradients as a 0-dim tensor on its device."""
        with torch.no_grad():
            return norms(self.grads(indices), self.dtype(indices))

    def kept(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return those whose gradient an update used, and nobody touched since."""
        return self._where(indices, lambda history: history.kept)

    def lost(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return those whose fresh gradient was cleared or edited and not replaced since."""
        return self._where(indices, lambda history: bool(history.lost))

    def holding(self, number: int) -> tuple[int, ...]:
        """Return those whose gradient holds backward pass ``number``."""
        return self._where(self.everything, lambda history: number in history.source)

    def held_passes(self) -> set[int]:
        """Return the backward passes that some gradient holds."""
        return {number for history in set(self._histories) for number in history.source}

    def portions(self, indices: tuple[int, ...]) -> tuple[Portion, ...]:
        """Part parameters by the history of their gradients."""
        if not indices:
            return ()
        first = self._histories[indices[0]]
        if self._alike():
            return (Portion(first.source, first.used, first.onto, indices),)
        groups: dict[tuple[Source, int, int], list[int]] = {}
        for i in indices:
            history = self._histories[i]
            groups.setdefault((history.source, history.used, history.onto), []).append(i)
        return tuple(Portion(*key, self.shared(group)) for key, group in groups.items())

    # -- what happened ------------------------------------------------------------------------------------------

    def seem_touched(self, indices: tuple[int, ...]) -> bool:
        """Tell from a few of these gradients whether somebody cleared or edited them since the last look.

        Who does that does it to many. What is missed here is seen by the next look.
        """
        for i in indices[:: max(1, len(indices) // NUM_SAMPLED)]:
            grad = self.tensors[i].grad
            if id(grad) != self._ids[i] or _version_of(grad) != self._versions[i]:
                return True
        return False

    def look(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See what was cleared and what was edited since the last look; returns both as indices."""
        ids, versions = self._read(self.everything)
        before = self._ids
        changed = self._changed(ids, versions)
        self._ids, self._versions = ids, versions
        if not changed:
            return (), ()
        cleared, present = self._part(changed, ids)
        in_place = present if ids == before else self.shared(i for i in present if ids[i] == before[i])
        others = () if in_place == present else self.shared(i for i in present if ids[i] != before[i])
        self._change(cleared, History.cleared)
        self._change(in_place, History.edited)
        self._change(others, History.replaced)
        return cleared, self._part(present, before)[1]

    def fill(self, number: int, only: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Ascribe what changed since the last look to backward pass ``number``; returns the filled indices."""
        ids, versions = self._read(self.everything if only is None else only)
        changed = self._changed(ids, versions)
        self._ids, self._versions = ids, versions
        cleared, filled = self._part(changed, ids)
        self._change(cleared, History.cleared_in_pass)
        self._change(filled, partial(History.filled, number=number))
        return filled

    def accept(self, indices: tuple[int, ...] | None = None) -> None:
        """Take the gradients as they are now, without ascribing what changed (a clip, an optimizer's own edit)."""
        self._ids, self._versions = self._read(self.everything if indices is None else indices)

    def use(self, indices: tuple[int, ...], number: int) -> None:
        """Note that an update used these gradients, up to backward pass ``number``, and take them as it left them."""
        if self.seem_touched(indices):
            self.accept(indices)
        gone, kept = self.parted(indices)
        self._change(gone, partial(History.stepped, number=number, kept=False))
        self._change(kept, partial(History.stepped, number=number, kept=True))

    # -- all at once where it can be ----------------------------------------------------------------------------

    def _read(self, indices: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Read the identities and versions of some gradients anew; returns those of all."""
        if len(indices) == len(self.tensors):
            grads = list(map(_grad, self.tensors))
            ids = list(map(id, grads))
            try:
                if _NO_GRADIENT not in ids:
                    return ids, list(map(_version, grads))
                return ids, [_NO_VERSION if grad is None else grad._version for grad in grads]
            except RuntimeError:  # gradients made in inference mode have no version
                return ids, list(map(_version_of, grads))
        ids, versions = self._ids.copy(), self._versions.copy()
        for i in indices:
            grad = self.tensors[i].grad
            ids[i] = id(grad)
            versions[i] = _version_of(grad)
        return ids, versions

    def _changed(self, ids: list[int], versions: list[int]) -> tuple[int, ...]:
        if versions == self._versions and ids == self._ids:
            return ()
        if not any(map(eq, versions, self._versions)):
            return self.everything
        pairs = zip(ids, self._ids, versions, self._versions, strict=True)
        return self.shared(i for i, (now, before, new, old) in enumerate(pairs) if now != before or new != old)

    def _part(self, indices: tuple[int, ...], ids: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Part indices into those without and those with a gradient."""
        num_none = ids.count(_NO_GRADIENT)
        if num_none == 0:
            return (), indices
        if num_none == len(ids):
            return indices, ()
        without = self.shared(i for i in indices if ids[i] == _NO_GRADIENT)
        return without, self.shared(i for i in indices if ids[i] != _NO_GRADIENT)

    def _alike(self) -> bool:
        if self._are_alike is None:
            histories = self._histories
            self._are_alike = bool(histories) and histories.count(histories[0]) == len(histories)
        return self._are_alike

    def _where(self, indices: tuple[int, ...], holds: Callable[[History], bool]) -> tuple[int, ...]:
        histories = self._histories
        if self._alike():
            return indices if holds(histories[0]) else ()
        return self.shared(i for i in indices if holds(histories[i]))

    def _change(self, indices: tuple[int, ...], happen: Callable[[History], History]) -> None:
        histories = self._histories
        if len(indices) == len(histories) and self._alike():
            self._histories = [happen(histories[0])] * len(histories)
            return
        if indices:
            self._are_alike = None
        known: dict[History, History] = {}
        for i in indices:
            history = histories[i]
            after = known.get(history)
            if after is None:
                after = known[history] = happen(history)
            histories[i] = after


def _version_of(grad: Tensor | None) -> int:
    return _NO_VERSION if grad is None or grad.is_inference() else grad._version
