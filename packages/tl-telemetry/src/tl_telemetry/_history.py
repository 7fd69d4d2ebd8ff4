"""What one gradient went through: an immutable value, so that all parameters that went through the same share one."""

from __future__ import annotations

from typing import NamedTuple

from tl_telemetry._events import BY_HAND, Source

# A loop that never clears its gradients adds a pass a step; the latest ones say all that a rule needs.
MAX_SOURCES = 64


class History(NamedTuple):
    """The history of a gradient up to now.

    Attributes:
        source: what it consists of.
        used: the last backward pass that an update used.
        lost: fresh content that was cleared or edited and not replaced since.
        kept: whether an update used all that is there, and nobody touched it since.
        onto: the pass that added to kept content; 0: none did.
        onto_edited: whether somebody edited that sum since.
    """

    source: Source = ()
    used: int = 0
    lost: Source = ()
    kept: bool = False
    onto: int = 0
    onto_edited: bool = False

    def cleared(self) -> History:
        """It became None."""
        return History((), self.used, self._fresh() or self.lost)

    def edited(self) -> History:
        """Its content was changed in place by somebody."""
        # scaled in place (a mean over workers, a clip by hand), the sum still holds what was left over; set to 0 in
        # place it does not: the next pass forgets it, and a step before that sees the norm
        return History((BY_HAND,), self.used, self._fresh() or self.lost, onto=self.onto, onto_edited=self.onto != 0)

    def replaced(self) -> History:
        """Somebody assigned another one."""
        return History((BY_HAND,), self.used, self._fresh() or self.lost)

    def cleared_in_pass(self) -> History:
        """It became None inside of a backward pass: an optimizer stepped in a hook."""
        return History((), self.used, self.lost)

    def filled(self, number: int) -> History:
        """Backward pass ``number`` added to it."""
        source = self.source
        if not source or source[-1] != number:
            source = (*source[-MAX_SOURCES:], number)
        onto = self.onto
        if self.kept:
            onto = number
        elif self.onto_edited:
            onto = 0
        return History(source, self.used, (), onto=onto)

    def stepped(self, number: int, *, kept: bool) -> History:
        """An update used it, up to backward pass ``number``; ``kept`` tells whether it is still there."""
        return History(self.source, number, (), kept)

    def _fresh(self) -> Source:
        return self.source if self.source and self.source[-1] > self.used else ()
