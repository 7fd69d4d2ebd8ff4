"""What a record is made of: one dataclass an act, in the order in which the acts were observed.

Parameters are given as indices into the run's ``Tensors``; figures as ``Span``s that are read when somebody looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from tl_telemetry._figures import Span

# What a gradient consists of: the numbers of the backward passes that were added up in it. BY_HAND stands for content
# that no backward pass put there (assigned, or edited in place by somebody other than a clip function).
Source = tuple[int, ...]
BY_HAND = -1


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss that a backward pass began at, or one term of a sum of losses."""

    name: str  # of the graph node that made it, without scalings and conversions: "MseLossBackward0"
    dtype: torch.dtype | None  # its own, or float16 or bfloat16 if it passed through that on its way to the root
    scaler: str | None  # the GradScaler whose scale multiplies it; None: none of the known ones does
    factors: tuple[float | Span, ...]  # what else multiplies it: numbers, and scalars that need no gradient
    known: bool  # False where what multiplies it could not be read (compiled code, saved tensors with hooks)


@dataclass(frozen=True, slots=True)
class Backward:
    """One outermost backward pass that accumulated gradients (``loss.backward()``)."""

    kind: ClassVar[str] = "backward"
    number: int  # counts from 1 within the run
    site: str  # "train.py:42", the line that called it
    filled: tuple[int, ...]  # parameters that got a gradient from it
    root: Span | None  # the value of what backward() was called on (scaled, with a GradScaler); None if it is no scalar
    connected: bool  # False when the root is a leaf: no graph behind it
    leftover: tuple[int, ...]  # parameters whose gradient an update had used, and that was still there
    leftover_norms: Span | None  # L2 norms of what was left over, before this pass added to it
    repeats: int | None  # number of the earlier pass from the very same loss, or from a term of it
    repeats_term: bool  # whether that was a term of the sum that this loss is
    repeated: tuple[int, ...]  # parameters that still held the earlier pass's gradient
    repeated_norms: Span | None
    in_step: str | None  # the optimizer inside whose step it ran (a closure)
    dtype: torch.dtype | None  # of what backward() was called on; None if that is several tensors
    terms: tuple[LossTerm, ...] | None  # None where neither a GradScaler nor another scaling was seen
    gradient: Span | None  # with a GradScaler: the value that backward() began with (1, or its gradient= argument)
    norms: Span | None  # of a scaled loss, in the first steps: L2 norms of the filled gradients after the pass


@dataclass(frozen=True, slots=True)
class Portion:
    """Parameters of one clip or step whose gradients have one history."""

    source: Source
    used: int  # the last backward number that an earlier update of theirs used
    onto: int  # the backward pass that added to what an earlier update had used; 0: none did
    parameters: tuple[int, ...]

    @property
    def fresh(self) -> bool:
        """Whether something came into the gradient since the last update that used it."""
        return not self.source or self.source[0] == BY_HAND or self.source[-1] > self.used

    @property
    def unused(self) -> tuple[int, ...]:
        """The backward passes in the gradient that no earlier update of these parameters had used."""
        return tuple(number for number in self.source if number > self.used)


@dataclass(frozen=True, slots=True)
class Clip:
    """One call of a clip function of ``torch.nn.utils``."""

    kind: ClassVar[str] = "clip"
    function: str
    site: str
    bound: float
    given: int  # how many tensors were passed
    with_gradient: int  # how many of them had a gradient, followed or not
    followed: tuple[int, ...]  # those of them that are followed parameters
    graded: tuple[int, ...]  # of those, the ones that had a gradient
    used: tuple[int, ...]  # of those, the ones whose gradient had gone into an update already
    portions: tuple[Portion, ...]
    norms: Span  # L2 norm of each graded one's gradient, before the clip
    scale: Span | None  # the loss scale, where the gradients were still scaled
    in_step: str | None


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One call of an optimizer's ``step()``."""

    kind: ClassVar[str] = "optimizer_step"
    optimizer: str
    graded: tuple[int, ...]  # parameters with a gradient when it ran
    ungraded: tuple[int, ...]  # trainable ones without
    frozen: tuple[int, ...]  # graded although they do not require a gradient
    norms: Span  # L2 norms of the graded ones' gradients
    updates: Span | None  # L2 norms of their change; None without update tracking
    unchanged: Span | None  # four counts of each low-precision parameter (_updates.Moved)
    low_precision: tuple[int, ...]
    lrs: tuple[float | Span, ...]
    scale: Span | None  # a fused optimizer's loss scale, when the gradients were still scaled
    found_inf: Span | None  # a fused optimizer's flag: 1 when it skipped the update itself
    scaler_stage: str | None  # "ready" (gradients still scaled), "unscaled", "stepped"; None without a scaler
    portions: tuple[Portion, ...]
    lost: tuple[int, ...]  # parameters whose fresh gradient was cleared or edited after its backward pass
    closure: bool
    evaluations: int  # how often its closure was evaluated, where the optimizer counts that (LBFGS); else 0
    backwards: int  # how many backward passes ran inside of the call, in its closure
    scaler: str | None  # the GradScaler whose step() called it; None: the person called it
    site: str  # with a GradScaler: the line that called it, or its scaler's step(); else ""

    @property
    def applied(self) -> bool:
        """Whether it was not skipped by a fused optimizer that found an overflow."""
        return self.found_inf is None or self.found_inf.value() == 0.0


@dataclass(frozen=True, slots=True)
class Unscaling:
    """A GradScaler divided an optimizer's gradients by its scale, and looked for NaN and Inf in them."""

    kind: ClassVar[str] = "unscale"
    optimizer: str
    scaler: str
    in_step: bool  # by scaler.step(); False: the person called scaler.unscale_()
    site: str
    scale: Span | None
    found_inf: Span | None  # one flag a device: 1 where it found NaN or Inf
    graded: tuple[int, ...]  # the optimizer's parameters that had a gradient
    portions: tuple[Portion, ...]
    norms: Span | None  # L2 norms of the graded ones' gradients, before they were divided; in the first steps
    largest: Span | None  # their largest absolute values, where somebody had edited them by hand


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A GradScaler's ``step()`` that did not call the optimizer's."""

    kind: ClassVar[str] = "skipped_step"
    optimizer: str
    scaler: str
    site: str
    found_inf: Span | None  # one flag a device: 1 where the scaler found NaN or Inf


@dataclass(frozen=True, slots=True)
class ScalerUpdate:
    """A GradScaler's ``update()``."""

    kind: ClassVar[str] = "scaler_update"
    scaler: str
    site: str  # "" for update(new_scale), which is only seen by what it leaves
    before: Span | None  # the scale before it
    after: Span | None
    found_inf: Span | None  # whether one of the optimizers' flags was set


@dataclass(frozen=True, slots=True)
class StateMoved:
    """Averages in ``setup.state`` were written to during the step; only looked at with a GradScaler."""

    kind: ClassVar[str] = "state_moved"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """A scheduler's counter moved (observed between two other acts)."""

    kind: ClassVar[str] = "scheduler_step"
    scheduler: str
    count: int


@dataclass(frozen=True, slots=True)
class GradientsCleared:
    """Gradients became None, or were edited or replaced by something other than a clip."""

    cleared: tuple[int, ...]
    edited: tuple[int, ...]

    @property
    def kind(self) -> str:
        # what an edit in place wrote is not known: zeros (set_to_none=False), or the gradient times a factor
        return "zero_grad" if self.cleared else "gradient_edit"


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning shown during the step."""

    kind: ClassVar[str] = "warning"
    message: str
    category: str
    site: str
    from_torch: bool


Event: TypeAlias = (
    Backward
    | Clip
    | Unscaling
    | OptimizerStep
    | SkippedStep
    | ScalerUpdate
    | SchedulerStep
    | GradientsCleared
    | StateMoved
    | Warned
)
