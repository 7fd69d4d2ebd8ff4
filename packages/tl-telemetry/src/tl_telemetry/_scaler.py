"""What GradScalers say of themselves, and which of their calls is running, without waiting for the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from tl_core import TrainingSetup
from tl_telemetry._sites import is_passed_by, shown_site

# Through how many callers a scaler's method is looked for: wrappers of optimizers and schedulers lie in between.
MAX_FRAMES = 25
# Scalers known at a time.
MAX_SCALERS = 8
_METHODS = frozenset({"step", "unscale_", "update", "_maybe_opt_step", "_unscale_grads_"})


def loss_scale(scaler: Any) -> Tensor | None:
    """Return the scale as the 0-dim tensor that the scaler keeps; None without one, or before its first ``scale()``."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else None


def scaler_stage(scaler: Any, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return how far the scaler is with an optimizer: ``"ready"`` (gradients scaled), ``"unscaled"`` or ``"stepped"``.

    None without a scaler, with a disabled one, and with one of another make that does not keep torch's states.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None or not scaler.is_enabled():
        return None
    state = states.get(id(optimizer))
    return "ready" if state is None else str(state["stage"].name).lower()


class Scalers:
    """The GradScalers of a setup by name, and others that act in its loop."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._names: dict[int, str] = {}
        self._all: list[GradScaler] = []
        self.strangers: set[str] = set()  # names of those that the setup does not hold
        self._of: dict[int, GradScaler] = {}  # an optimizer's id -> the scaler that unscaled it last
        self.refresh()

    def refresh(self) -> None:
        """Take in the setup's scalers: the loop may have set one since."""
        setup = self._setup
        for title, members in (
            ("scaler", {"": setup.scaler}),
            ("scaler", getattr(setup.scaler, "__dict__", {})),  # of a class of somebody's own around torch's
            ("setup.state[{!r}]", setup.state),
            ("setup.{}", vars(setup)),
        ):
            for name, value in members.items():
                if isinstance(value, GradScaler) and id(value) not in self._names:
                    self._add(value, title.format(name))

    def _add(self, scaler: GradScaler, name: str) -> None:
        if len(self._all) == MAX_SCALERS:  # a loop that makes a scaler in each step would fill up memory
            del self._names[id(self._all.pop(0))]
        self._names[id(scaler)] = name
        self._all.append(scaler)  # kept alive, so that its id stays its own

    @property
    def active(self) -> bool:
        """Whether any of them scales: False without one, and where all are disabled."""
        return any(scaler.is_enabled() for scaler in self._all)

    def __iter__(self) -> Iterator[tuple[str, GradScaler]]:
        return ((self._names[id(scaler)], scaler) for scaler in self._all)

    def name(self, scaler: GradScaler) -> str:
        """Return a scaler's name, taking in one that was not known."""
        if id(scaler) not in self._names:
            self.refresh()
            if id(scaler) not in self._names:
                self._add(scaler, f"a {type(scaler).__name__} that is not in the setup")
                self.strangers.add(self._names[id(scaler)])
        return self._names[id(scaler)]

    def scales(self) -> dict[int, str]:
        """Return the names of the scalers that have a scale, by where in memory it lies."""
        found = ((loss_scale(scaler), name) for name, scaler in self)
        return {scale.data_ptr(): name for scale, name in found if scale is not None}

    def acts_on(self, scaler: GradScaler, optimizer: Any) -> None:
        """Note which scaler an optimizer is unscaled by."""
        self._of[id(optimizer)] = scaler

    def of(self, optimizer: Any) -> GradScaler | None:
        """Return the scaler of an optimizer: the one that unscaled it last, else the setup's first one."""
        known = self._of.get(id(optimizer))
        return known if known is not None else next(iter(self._all), None)

    def stage(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        """Return how far its scaler is with an optimizer (``scaler_stage``)."""
        return scaler_stage(self.of(optimizer), optimizer)


@dataclass(frozen=True, slots=True)
class ScalerCall:
    """A call of a scaler's method that is running.

    Attributes:
        scaler: the scaler.
        optimizer: what it was given.
        in_step: whether its ``step`` is running, whoever calls what inside of it.
        site: the line that called it, in the person's code.
        flag: while gradients are unscaled, the flag that all of its calls to torch share.
    """

    scaler: GradScaler
    optimizer: Any
    in_step: bool
    site: str
    flag: Any


def scaler_call() -> ScalerCall | None:
    """Return the call of a GradScaler's method that is running; None where none is."""
    frame: FrameType | None = sys._getframe(1)
    scaler: GradScaler | None = None
    optimizer: Any = None
    flag: Any = None
    in_step = False
    left = MAX_FRAMES
    while frame is not None and left:
        left -= 1
        own = _running_scaler(frame)
        if own is not None and scaler in (None, own):
            scaler = own
            optimizer = frame.f_locals.get("optimizer", optimizer)
            flag = frame.f_locals.get("found_inf", flag)
            in_step = in_step or frame.f_code.co_name in ("step", "_maybe_opt_step")
        elif scaler is not None and not is_passed_by(frame.f_code.co_filename):
            break
        frame = frame.f_back
    if scaler is None:
        return None
    site = "?" if frame is None else shown_site(frame.f_code.co_filename, frame.f_lineno)
    return ScalerCall(scaler, optimizer, in_step, site, flag)


def _running_scaler(frame: FrameType) -> GradScaler | None:
    """Return the GradScaler whose method a frame runs; None for other frames."""
    if frame.f_code.co_name not in _METHODS:
        return None
    variables: Mapping[str, Any] = frame.f_locals
    own = variables.get("self")
    return own if isinstance(own, GradScaler) else None
