"""Lets the checks find the person's code behind a step of this package's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def running(builder: Callable[..., object]) -> Callable[[F], F]:
    """Mark a step as one that runs what ``builder`` builds, whose code keeps things in globals and closures."""

    def mark(step: F) -> F:
        step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]  # else it would be the builder's
        step.__wrapped__ = builder  # type: ignore[attr-defined]
        return step

    return mark
