"""Save, load and compare training state, and prove that a resumed run is the same run.

Names are looked up when they are asked for: the command line answers ``--help`` without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tl_resume._check import ResumeReport, assert_resume_equivalent, check_resume_equivalent
    from tl_resume._crash import assert_checkpoint_crash_safe, check_checkpoint_crash_safe
    from tl_resume._diff import StateDiff, diff_states
    from tl_resume._files import load_training_state, save_training_state
    from tl_resume._format import StateFileError
    from tl_resume._state import training_state

__all__ = [
    "ResumeReport",
    "StateDiff",
    "StateFileError",
    "assert_checkpoint_crash_safe",
    "assert_resume_equivalent",
    "check_checkpoint_crash_safe",
    "check_resume_equivalent",
    "diff_states",
    "load_training_state",
    "save_training_state",
    "training_state",
]

# The module of each public name.
_HOMES = {
    "ResumeReport": "tl_resume._check",
    "StateDiff": "tl_resume._diff",
    "StateFileError": "tl_resume._format",
    "assert_checkpoint_crash_safe": "tl_resume._crash",
    "assert_resume_equivalent": "tl_resume._check",
    "check_checkpoint_crash_safe": "tl_resume._crash",
    "check_resume_equivalent": "tl_resume._check",
    "diff_states": "tl_resume._diff",
    "load_training_state": "tl_resume._files",
    "save_training_state": "tl_resume._files",
    "training_state": "tl_resume._state",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # looked up once
        return value
    raise AttributeError(f"module 'tl_resume' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
