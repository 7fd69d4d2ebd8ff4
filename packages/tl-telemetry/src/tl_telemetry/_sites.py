"""Lines of the person's code, for messages; and the observer's frames, cut from passing tracebacks."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep


def calling_site() -> str:
    """Return ``file.py:line`` of the nearest caller outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _OWN)):
            return shown_site(filename, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


def shown_site(filename: str, lineno: int) -> str:
    """Return ``file.py:line``."""
    return f"{os.path.basename(filename)}:{lineno}"


def in_torch(filename: str) -> bool:
    """Tell whether a file is torch's own."""
    return filename.startswith(_TORCH)


def cut_own_frames(traceback: TracebackType | None) -> None:
    """Unlink this package's frames from a traceback, in place, all but a first one."""
    while traceback is not None and traceback.tb_next is not None:
        if traceback.tb_next.tb_frame.f_code.co_filename.startswith(_OWN):
            traceback.tb_next = traceback.tb_next.tb_next
        else:
            traceback = traceback.tb_next
