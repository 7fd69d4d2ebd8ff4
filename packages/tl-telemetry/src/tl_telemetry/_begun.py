"""What was read when an act began, kept until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType

import torch

from tl_telemetry._events import LossTerm, Portion
from tl_telemetry._figures import Span
from tl_telemetry._gradient_log import Gradients
from tl_telemetry._steppers import Stepper
from tl_telemetry._updates import Copied


@dataclass(slots=True)
class BackwardBegun:
    """What was read before a backward pass ran."""

    site: str
    root: Span | None
    connected: bool
    leftover: tuple[int, ...]
    leftover_norms: Span | None
    repeats: int | None
    repeats_term: bool
    repeated: tuple[int, ...]
    repeated_norms: Span | None
    dtype: torch.dtype | None
    terms: tuple[LossTerm, ...] | None
    gradient: Span | None
    grads: Gradients  # copies, where a log asks for them
    filled: set[int] = field(default_factory=set)  # by now, seen by optimizers that step inside of the pass


@dataclass(slots=True)
class Seen:
    """What an optimizer has to work with."""

    graded: tuple[int, ...]
    ungraded: tuple[int, ...]
    frozen: tuple[int, ...]
    norms: Span
    lrs: tuple[float | Span, ...]
    scale: Span | None
    found_inf: Span | None
    stage: str | None
    portions: tuple[Portion, ...]
    lost: tuple[int, ...]


@dataclass(slots=True)
class Call:
    """One call of an optimizer's ``step()`` that runs, or that raised."""

    stepper: Stepper
    frame: FrameType | None
    records: bool  # False inside of another one's step, as a wrapper or a subclass calls it: that one's update
    scaler: str | None  # the GradScaler whose step() called it
    site: str  # the line of that call, with a GradScaler
    seen: Seen | None = None
    evaluations: int = 0  # of closures, over its life, when the call began
    backwards: int = 0  # how many backward passes there had been when the call began
    copied: Copied | None = None
    grads: Gradients | None = None  # copies, where a log asks for them
