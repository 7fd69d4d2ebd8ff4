"""Checks for PyTorch training loops, on what the Hugging Face Trainer really runs."""

from tl_hf._accumulate import assert_hf_accumulation_equivalent, check_hf_accumulation_equivalent
from tl_hf._coverage import assert_hf_optimizer_coverage, check_hf_optimizer_coverage
from tl_hf._resume import assert_hf_resume_equivalent, check_hf_resume_equivalent
from tl_hf._trainer import make_hf_trainer
from tl_hf._watch import watch_hf

__all__ = [
    "assert_hf_accumulation_equivalent",
    "assert_hf_optimizer_coverage",
    "assert_hf_resume_equivalent",
    "check_hf_accumulation_equivalent",
    "check_hf_optimizer_coverage",
    "check_hf_resume_equivalent",
    "make_hf_trainer",
    "watch_hf",
]
