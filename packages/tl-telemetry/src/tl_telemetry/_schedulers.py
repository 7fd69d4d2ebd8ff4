"""Sees schedulers step by polling what they count, so that no scheduler needs a patch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tl_core import TrainingSetup
from tl_telemetry._steppers import Stepper, holds


class Schedulers:
    """The counters of the setup's schedulers, as last seen."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._seen: dict[str, tuple[int, tuple[Any, ...]]] = {}

    def look(self) -> list[tuple[str, int]]:
        """Return (name, how often it stepped) for each scheduler that stepped since the last look."""
        moved = []
        for name, scheduler in self._setup.schedulers.items():
            state = _counters(scheduler)
            before = self._seen.get(name)
            self._seen[name] = (id(scheduler), state)
            # a scheduler that was replaced or is new has not stepped
            if before is None or before[0] != id(scheduler) or not _moved(before[1], state):
                continue
            moved.append((name, _count(before[1], state)))
        return moved


def is_orphan(scheduler: object, setup: TrainingSetup, steppers: Iterable[Stepper]) -> bool:
    """Tell whether a scheduler drives an optimizer that is not in the setup and does not step (any more)."""
    driven = driven_by(scheduler)
    if driven is None or any(belong(driven, own) for own in setup.optimizers.values()):
        return False
    stepper = next((one for one in steppers if belong(driven, one.optimizer)), None)
    # one that steps without being in the setup has a name that says so
    return stepper is None or stepper.name in setup.optimizers


def unwrapped(scheduler: Any) -> Any:
    """Return the scheduler inside of a wrapper (accelerate's), which has no counter itself."""
    while not hasattr(scheduler, "last_epoch") and hasattr(inner := getattr(scheduler, "scheduler", None), "step"):
        scheduler = inner
    return scheduler


def driven_by(scheduler: object) -> Any:
    """Return the optimizer that a scheduler drives, or None where it does not say."""
    return getattr(unwrapped(scheduler), "optimizer", None)


def drives(scheduler: object, optimizer: object) -> bool:
    """Tell whether a scheduler drives an optimizer, whichever of them is wrapped."""
    return belong(driven_by(scheduler), optimizer)


def belong(driven: object, own: object) -> bool:
    """Tell whether two optimizers are one, a wrapper and what it wraps, or share their groups."""
    if driven is None or own is None:
        return False
    if driven is own or holds(own, driven) or holds(driven, own):
        return True
    groups = set(map(id, getattr(driven, "param_groups", ())))
    return any(id(group) in groups for group in getattr(own, "param_groups", ()))


def _counters(scheduler: Any) -> tuple[Any, ...]:
    """Return what moves when the scheduler steps; the first two entries count its steps, or are None."""
    own = vars(unwrapped(scheduler))
    parts = own.get("_schedulers")  # ChainedScheduler has no counter of its own
    count = own.get("last_epoch")
    if count is None and parts:
        count = getattr(parts[0], "last_epoch", None)
    if count is not None:
        # CosineAnnealingWarmRestarts moves only T_cur when it steps by fractions of an epoch
        return (count, own.get("_step_count"), own.get("T_cur"))
    # somebody's own class: any number it keeps may be its counter
    return (None, None, *((k, v) for k, v in own.items() if isinstance(v, (int, float)) and not isinstance(v, bool)))


def _moved(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) == len(now) and now[0] is not None:
        # accelerate adds to _step_count in micro-batches in which it leaves the scheduler where it is
        return (before[0], before[2:]) != (now[0], now[2:])
    return before != now


def _count(before: tuple[Any, ...], now: tuple[Any, ...]) -> int:
    # the calls are counted, with some that accelerate made up, and the epochs, which step(epoch) may jump over
    pairs = ((before[0], now[0]), (before[1], now[1]))
    more = [later - earlier for earlier, later in pairs if isinstance(earlier, int) and isinstance(later, int)]
    return max(1, min(more, default=1))
