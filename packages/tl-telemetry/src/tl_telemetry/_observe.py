"""The context manager that watches any loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tl_core import TrainingSetup
from tl_telemetry._facts import Facts
from tl_telemetry._gradient_log import GradientLog
from tl_telemetry._recorder import Recorder
from tl_telemetry._run import TrainingRun
from tl_telemetry._sites import cut_own_frames


@contextmanager
def observe(
    setup: TrainingSetup,
    *,
    track_updates: bool = True,
    allow: Iterable[str] = (),
    gradients: GradientLog | None = None,
) -> Iterator[TrainingRun]:
    """Watch a setup while any loop trains it.

    Inside, ``with run.step() as s: ...; s.loss = loss`` makes one record a step. A loop that gives no steps gets one
    record an update. Everything is put back on leaving, also when the loop raises.

    Args:
        setup: what the loop trains.
        track_updates: measure how far each step moves the parameters; costs one copy of the parameters.
        allow: ids of rules that are allowed to be broken in this run.
        gradients: collects the whole gradients around each act; waits for the device, and costs copies.

    Yields:
        The run. Its records can be read at any time; a look at a figure waits for the device.

    Raises:
        TypeError: ``setup`` is not a ``TrainingSetup``, or ``allow`` is a plain string.
        ValueError: ``allow`` names a rule that does not exist.

    Example:
        >>> with observe(setup) as run:
        ...     trainer.fit(model, loader)
        >>> run.assert_healthy()
    """
    if not isinstance(setup, TrainingSetup):
        kind = type(setup).__name__
        raise TypeError(f"setup must be a TrainingSetup, got {kind}: write TrainingSetup(model, optimizer, ...)")
    recorder = Recorder(setup, track_updates=track_updates, log=gradients)
    run = TrainingRun(Facts(setup, recorder), allow=allow)
    recorder.attach()
    try:
        yield run
    except BaseException as error:
        cut_own_frames(error.__traceback__)
        raise
    finally:
        recorder.detach()
        run.facts.close()
