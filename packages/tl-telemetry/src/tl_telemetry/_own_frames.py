"""Gives what runs in a greenlet native frames of its own, as many as torch looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# For each error that it raises, torch walks up the 64 innermost native frames (c10's backtrace, torch 2.13).
_NUM_FRAMES = 70


def with_own_frames(function: Callable[[], Any]) -> Any:
    """Call a function deep enough in the native stack that walking up from it stays among its own frames.

    What lies under a greenlet's first frame is its caller's stack, which has changed when the greenlet goes on: a walk
    that gets there ends in a segmentation fault. Calls from Python to Python take no native frame (Python 3.11 and
    later), calls through C do.

    Returns:
        What the function returns; what it raises passes through, without the frames in between.
    """
    returned: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(function())
        except BaseException as error:  # noqa: BLE001  it is raised again below
            raised.append(error)

    nested: Callable[[], Any] = run
    for _ in range(_NUM_FRAMES):
        nested = functools.partial(_call, nested)
    nested()
    if raised:
        raise raised.pop()
    return returned.pop()


def _call(function: Callable[[], Any]) -> None:
    function()
