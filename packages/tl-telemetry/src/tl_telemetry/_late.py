"""A run whose setup comes to be only after watching was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from tl_core import Finding, NotJudged, Report, TrainingSetup
from tl_telemetry._facts import Facts
from tl_telemetry._judge import CHECK
from tl_telemetry._observe import observe
from tl_telemetry._run import TrainingRun


class LateRun(TrainingRun):
    """What is observed of a loop that builds its setup itself, as a Trainer does in ``fit``.

    Who watches it calls ``begin(setup)`` when the setup is there, in the thread that trains. Until then the run knows
    nothing, and any look at it is a ``RuntimeError``.
    """

    def __init__(self, *, track_updates: bool = True, allow: Iterable[str] = ()) -> None:
        self._observed: TrainingRun | None = None
        self._watch = ExitStack()
        self._track_updates = track_updates
        self._over = False
        super().__init__(None, allow=allow)

    def __repr__(self) -> str:
        return "LateRun(training has not begun)" if self._observed is None else super().__repr__()

    @property
    def facts(self) -> Facts:
        """The facts of what is observed."""
        if self._observed is not None:
            return self._observed.facts
        if self._over:
            not_begun = Finding(
                "not-judged", "no training began inside of the watch", "", "look at its limits and data"
            )
            raise NotJudged(Report(CHECK, notes=(not_begun,), judged=False))
        raise RuntimeError("nothing was observed: the training that this run waits for has not begun")

    @property
    def begun(self) -> bool:
        """Whether there is something to look at."""
        return self._observed is not None

    def begin(self, setup: TrainingSetup) -> None:
        """Watch the setup from now on.

        Args:
            setup: what the loop trains.

        Raises:
            RuntimeError: a setup was observed already: a run is that of one training.
        """
        if self._observed is not None:
            raise RuntimeError("a second training began inside of one watch: give each a watch of its own")
        self._observed = self._watch.enter_context(observe(setup, track_updates=self._track_updates))

    def end(self) -> None:
        """Stop watching, and put everything back; without a beginning, or a second time, nothing happens."""
        self._over = True
        self._watch.close()


@contextmanager
def observe_later(*, track_updates: bool = True, allow: Iterable[str] = ()) -> Iterator[LateRun]:
    """Watch a loop that builds its setup itself: ``run.begin(setup)`` says when it is there.

    Args:
        track_updates: measure how far each step moves the parameters; costs one copy of the parameters.
        allow: ids of rules that are allowed to be broken in this run.

    Yields:
        The run. Everything is put back on leaving.

    Example:
        >>> with observe_later() as run:
        ...     main(on_setup=run.begin)
        >>> run.assert_healthy()
    """
    run = LateRun(track_updates=track_updates, allow=allow)
    try:
        yield run
    finally:
        run.end()
