"""Where two runs part: in a loss, in a weight, in what the step raises, or in state at the end."""

from __future__ import annotations

from dataclasses import dataclass

from tl_telemetry import Divergence, StateDifference


@dataclass(frozen=True)
class Parting:
    """The first place at which a run is another one than the uninterrupted run; one of three is given.

    Attributes:
        step: the step in which they part.
        figure: the loss, or the weight's norm, that differs.
        state: what differs at the end although losses and weights agree.
        raised: what the step raised.
    """

    step: int
    figure: Divergence | None = None
    state: StateDifference | None = None
    raised: str = ""
