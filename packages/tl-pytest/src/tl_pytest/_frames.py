"""Cuts the frames of the checks from tracebacks."""

from __future__ import annotations

import sys
from types import TracebackType

import pytest

from tl_core import CheckFailed, NotJudged

_PARTS = ("accum", "amp", "core", "coverage", "hf", "lightning", "pytest", "resume", "telemetry")
_OWN = frozenset(f"tl_{part}" for part in _PARTS)
# what the checks call for purposes of their own, and the frameworks between them and the person's code
_FRAMEWORKS = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
_PYTEST = ("_pytest", "pluggy")
_LIBRARIES = sys.stdlib_module_names | {"numpy", "rich", "torch"} | _FRAMEWORKS


def without_own_frames(excinfo: pytest.ExceptionInfo[BaseException]) -> TracebackType:
    """Cut the frames of the checks from a traceback, so that it ends at the person's line.

    A verdict is cut, an error about an argument (a ValueError or TypeError that a check itself raises) or about an
    extra that is not installed, and what the person's code raised when a check called it, or a Trainer that a check
    runs, whose frames in between are cut too. Any other exception keeps its frames: it may come from a defect of the
    checks, and then they are what helps.

    Args:
        excinfo: The exception of a test or fixture.

    Returns:
        The traceback to show; the whole one when nothing but pytest would be left of it, as in a fixture of tl-pytest.
    """
    chain = []
    link: TracebackType | None = excinfo.tb
    while link is not None:
        chain.append(link)
        link = link.tb_next
    own = [number for number, link in enumerate(chain) if _is_own(link)]
    if not own:
        return excinfo.tb
    below = chain[own[-1] + 1 :]  # what the innermost of the checks' functions called
    if not isinstance(excinfo.value, (CheckFailed, NotJudged)):
        misuse = isinstance(excinfo.value, (ValueError, TypeError, ImportError)) and not below
        while below and _top(below[0]) in _LIBRARIES:
            del below[0]
        if not misuse and not below:
            return excinfo.tb
    # contextlib's frames stand between a check's context manager and the person's `with`, those of a framework between
    # what runs its loop and what listens to it
    between = {"contextlib"} | _FRAMEWORKS
    above = [link for link in chain[: own[-1]] if not _is_own(link) and _top(link) not in between]
    left = [*above, *below]
    if all(_top(link) in _PYTEST for link in left):
        return excinfo.tb
    short: TracebackType | None = None
    for link in reversed(left):
        short = TracebackType(short, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return short or excinfo.tb


def _is_own(link: TracebackType) -> bool:
    return _top(link) in _OWN


def _top(link: TracebackType) -> str:
    """Return the package that a frame's function is from."""
    return str(link.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
