"""Lines of the person's code, for messages; and the observer's frames, cut from passing tracebacks."""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_WARNINGS = warnings.__file__
_DYNAMO = _TORCH + "_dynamo" + os.sep
# Checks that run a person's loop within something of their own (a function mode, a patch).
_RUNNERS = ("tl_accum",)
# Frameworks whose Trainers run a person's code: the line of that says more than theirs.
_FRAMEWORKS = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"),
    *("tl_lightning", "tl_hf", "greenlet"),  # what runs these here
)


def calling_site() -> str:
    """Return ``file.py:line`` of the nearest caller outside of torch, of this package and of the checks around it.

    A framework's line counts only where none of the person's own called it.
    """
    frame: FrameType | None = sys._getframe(1)
    nearest = "?"
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_passed_by(filename):
            site = shown_site(filename, frame.f_lineno)
            if not _of(filename, _FRAMEWORKS):
                return site
            nearest = site if nearest == "?" else nearest
        frame = frame.f_back
    return nearest


@lru_cache(maxsize=1024)
def is_passed_by(filename: str) -> bool:
    return filename.startswith((_TORCH, _OWN)) or _of(filename, _RUNNERS)


@lru_cache(maxsize=1024)
def _of(filename: str, packages: tuple[str, ...]) -> bool:
    """Tell whether a file belongs to one of some packages, as far as these are imported."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in packages)
    return filename.startswith(tuple(os.path.dirname(file) + os.sep for file in files if file))


def calling_frame() -> FrameType | None:
    """Return the frame that called into this package, seen through the wrappers that keep dynamo out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _DYNAMO)):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Tell whether a frame is among the callers."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


@lru_cache(maxsize=1024)
def shown_site(filename: str, lineno: int) -> str:
    """Return ``file.py:line``."""
    return f"{os.path.basename(filename)}:{lineno}"


def in_torch(filename: str) -> bool:
    """Tell whether a file is torch's own."""
    return filename.startswith(_TORCH)


def in_this_package(filename: str) -> bool:
    """Tell whether a file is this package's own."""
    return filename.startswith(_OWN)


def raised_in_torch() -> bool:
    """Tell whether torch's own Python code raised the warning that is being shown, whichever line it blames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _WARNINGS)):
        frame = frame.f_back
    return frame is not None and in_torch(frame.f_code.co_filename)


def cut_own_frames(traceback: TracebackType | None) -> None:
    """Unlink this package's frames from a traceback, in place, all but a first one."""
    kept: TracebackType | None = None
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for entry, following in zip(reversed(entries), [None, *reversed(entries)], strict=False):
        # entries that are cut lead on to what is kept too: somebody may hold the traceback from there on
        entry.tb_next = kept
        filename = entry.tb_frame.f_code.co_filename
        # torch's wrapper around a patched function goes with it
        wrapper = filename.startswith(_DYNAMO) and following is not None and _is_own(following)
        if not (filename.startswith(_OWN) or wrapper):
            kept = entry


def _is_own(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename.startswith(_OWN)
