"""Runs a loop that owns its control flow, as a Trainer does, from one pause to the next."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tl_telemetry._own_frames import with_own_frames


class SteppedLoop:
    """Run a function that trains in a loop of its own, and stop it wherever it calls ``pause``.

    The function runs in the caller's thread, in a greenlet, so that all is as if it had been called (with a copy of the
    caller's context variables, as they are when it begins). A loop that cannot
    be cut open (``Trainer.fit``, a ``main()`` with the loop inside) gives the steps that the checks run this way. Needs
    the package greenlet: ``pip install "tl-telemetry[stepped]"``.

    Example:
        >>> def train(pause):
        ...     for number in range(2):
        ...         pause(number)
        >>> loop = SteppedLoop(train)
        >>> loop.advance(), loop.advance(), loop.over
        (0, 1, False)

    Args:
        function: called with ``pause``. ``pause(value)`` makes ``advance()`` return ``value``, and returns what the
            next ``advance(answer)`` is given.

    Attributes:
        over: whether the function has returned, has raised, or was closed.
        result: what it returned; None before.

    Raises:
        ImportError: greenlet is not installed.
    """

    def __init__(self, function: Callable[[Callable[..., Any]], Any]) -> None:
        try:
            import greenlet
        except ImportError as error:
            message = 'SteppedLoop needs the package greenlet: pip install "tl-telemetry[stepped]"'
            raise ImportError(message) from error
        self.over = False
        self.result: Any = None
        self._closing = closing = [False]
        self._current = greenlet.getcurrent
        self._exit = greenlet.GreenletExit

        # It holds neither this object nor the greenlet: no garbage collector looks into a greenlet's frames, so that
        # the two have to die with their last user.
        def pause(value: Any = None) -> Any:
            running = own()
            if running is None or running is not greenlet.getcurrent():
                raise RuntimeError("pause() was called outside of the function that SteppedLoop runs")
            if closing[0]:
                raise greenlet.GreenletExit
            caller = running.parent
            del running  # this frame is the greenlet's own: it would keep itself alive
            return caller.switch(value)

        self._greenlet = greenlet.greenlet(lambda: with_own_frames(lambda: function(pause)))
        own = weakref.ref(self._greenlet)

    def advance(self, answer: Any = None) -> Any:
        """Run until the next pause.

        Args:
            answer: what the pause in which the function stands returns.

        Returns:
            What the next pause was given; None when the function returned instead, as ``over`` tells.

        Raises:
            RuntimeError: the function is over, or began in another thread. What the function raises passes through.
        """
        if self.over:
            raise RuntimeError("the loop is over: it cannot be advanced any more")
        self._come_back_here()
        try:
            if self._greenlet:  # it has begun
                given = self._greenlet.switch(answer)
            else:
                self._greenlet.gr_context = contextvars.copy_context()  # else it would begin with an empty one
                given = self._greenlet.switch()
        finally:
            self.over = self._greenlet.dead
        if self.over:
            self.result, given = given, None
        return given

    def close(self) -> None:
        """End the function where it stands, as an exception would: its ``finally`` blocks run.

        Raises:
            RuntimeError: the function began in another thread. What its ``finally`` blocks raise passes through.
        """
        if self.over:
            return
        self._come_back_here()
        self.over = self._closing[0] = True
        if self._greenlet:  # it has begun
            self._greenlet.throw(self._exit)

    def _come_back_here(self) -> None:
        """Let pauses, and the end, lead to whoever calls now."""
        try:
            self._greenlet.parent = self._current()
        except ValueError:
            message = "the loop began in another thread: it can only be advanced and closed there"
            raise RuntimeError(message) from None

    def __enter__(self) -> SteppedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
