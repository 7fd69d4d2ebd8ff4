"""Whether a crash in the middle of a save costs the checkpoint."""

from tl_resume._crash._check import assert_checkpoint_crash_safe, check_checkpoint_crash_safe

__all__ = ["assert_checkpoint_crash_safe", "check_checkpoint_crash_safe"]
