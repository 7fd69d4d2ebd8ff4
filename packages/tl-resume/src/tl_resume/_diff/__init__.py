"""The comparison of training states: where they come from, what differs, and how that is written."""

from tl_resume._diff._compare import diff_states
from tl_resume._diff._report import Difference, Entry, StateDiff, Unreadable

__all__ = ["Difference", "Entry", "StateDiff", "Unreadable", "diff_states"]
