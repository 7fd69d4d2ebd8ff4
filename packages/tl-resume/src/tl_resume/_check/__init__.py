"""The resume check: three runs, their comparison, and the cause of what differs."""

from tl_resume._check._assert import assert_resume_equivalent, check_resume_equivalent
from tl_resume._check._report import ResumeReport

__all__ = ["ResumeReport", "assert_resume_equivalent", "check_resume_equivalent"]
