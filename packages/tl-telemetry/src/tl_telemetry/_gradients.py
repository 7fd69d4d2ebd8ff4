"""Where the content of every gradient came from: filled by which backward passes, used by which update.

torch has no hook for ``zero_grad``; what happened between two acts is read off the gradients themselves. A gradient's
identity and version tell whether it was replaced, cleared or edited since the last look, at the cost of two attribute
reads a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ._events import BY_HAND, Portion, Source

# A loop that never clears its gradients adds a pass a step; the latest ones say all that a rule needs.
MAX_SOURCES = 64

_NO_GRADIENT = id(None)


class Gradients:
    """The history of each followed parameter's gradient, indexed like the run's ``Tensors``."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.sources: list[Source] = []
        self.used: list[int] = []
        self.lost: list[Source] = []  # fresh content that was cleared or edited and not replaced since
        self.kept: list[bool] = []  # whether an update used all that is there, and nobody touched it since
        self.onto: list[int] = []  # the pass that added to kept content; negative once somebody edited the sum
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Follow further tensors; a gradient that is already there counts as put there by hand."""
        for tensor in tensors:
            grad = tensor.grad
            self.tensors.append(tensor)
            self.sources.append(() if grad is None else (BY_HAND,))
            self.used.append(0)
            self.lost.append(())
            self.kept.append(False)
            self.onto.append(0)
            self._ids.append(id(grad))
            self._versions.append(-1 if grad is None else grad._version)

    def shared(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return one tuple object for equal ones: steps repeat, and records are kept for the whole run."""
        key = tuple(indices)
        return self._shared.setdefault(key, key)

    def has_fresh(self, index: int) -> bool:
        source = self.sources[index]
        return bool(source) and source[-1] > self.used[index]

    def look(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See what was cleared and what was edited since the last look; returns both as indices."""
        ids, versions = self._read()
        if ids == self._ids and versions == self._versions:
            return (), ()
        cleared, edited = [], []
        for i, (now, before) in enumerate(zip(ids, self._ids, strict=True)):
            if now == before and versions[i] == self._versions[i]:
                continue
            fresh = self.sources[i] if self.has_fresh(i) else ()
            self.kept[i] = False
            # scaled in place (a mean over workers, a clip by hand), the sum still holds what was left over; set to 0 in
            # place it does not: the next pass forgets it, and a step before that sees the norm
            self.onto[i] = -abs(self.onto[i]) if now == before else 0
            if now == _NO_GRADIENT:
                self.sources[i] = ()
                cleared.append(i)
            else:
                self.sources[i] = (BY_HAND,)
                if before != _NO_GRADIENT:
                    edited.append(i)
            if fresh:
                self.lost[i] = fresh
        self._ids, self._versions = ids, versions
        return self.shared(cleared), self.shared(edited)

    def fill(self, number: int, only: Sequence[int] | None = None) -> tuple[int, ...]:
        """Ascribe what changed since the last look to backward pass ``number``; returns the filled indices."""
        ids, versions = self._read()
        filled = []
        extended: dict[Source, Source] = {}
        for i in range(len(ids)) if only is None else only:
            if ids[i] == self._ids[i] and versions[i] == self._versions[i]:
                continue
            if ids[i] == _NO_GRADIENT:  # cleared inside of the pass: an optimizer that steps in a hook
                self.sources[i], self.kept[i], self.onto[i] = (), False, 0
            else:
                before = self.sources[i]
                if self.kept[i] or self.onto[i] < 0:
                    self.onto[i] = number if self.kept[i] else 0
                    self.kept[i] = False
                if not before or before[-1] != number:
                    self.sources[i] = extended.setdefault(before, (*before[-MAX_SOURCES:], number))
                self.lost[i] = ()
                filled.append(i)
            self._ids[i], self._versions[i] = ids[i], versions[i]
        return self.shared(filled)

    def accept(self, indices: Iterable[int] | None = None) -> None:
        """Take the gradients as they are now, without ascribing what changed (a clip, an optimizer's own edit)."""
        if indices is None:
            self._ids, self._versions = self._read()
            return
        for i in indices:
            grad = self.tensors[i].grad
            self._ids[i] = id(grad)
            self._versions[i] = -1 if grad is None else grad._version

    def use(self, indices: Iterable[int], number: int) -> None:
        """Note that an update used these gradients, up to backward pass ``number``, and take them as it left them."""
        self.accept(indices)
        for i in indices:
            self.used[i] = number
            self.kept[i] = self._ids[i] != _NO_GRADIENT
            self.onto[i] = 0
            self.lost[i] = ()

    def portions(self, indices: Sequence[int]) -> tuple[Portion, ...]:
        """Part parameters by the history of their gradients."""
        groups: dict[tuple[Source, int, int], list[int]] = {}
        for i in indices:
            groups.setdefault((self.sources[i], self.used[i], abs(self.onto[i])), []).append(i)
        return tuple(Portion(*history, self.shared(group)) for history, group in groups.items())

    def _read(self) -> tuple[list[int], list[int]]:
        grads = [tensor.grad for tensor in self.tensors]
        return list(map(id, grads)), [-1 if grad is None else grad._version for grad in grads]
