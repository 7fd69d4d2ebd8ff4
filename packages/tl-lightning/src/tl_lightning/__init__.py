"""Checks for PyTorch training loops, on what Lightning's Trainer really runs."""

from tl_lightning._accumulate import assert_lightning_accumulation_equivalent, check_lightning_accumulation_equivalent
from tl_lightning._from_lightning import from_lightning
from tl_lightning._resume import assert_lightning_resume_equivalent, check_lightning_resume_equivalent
from tl_lightning._trainer import make_lightning_trainer
from tl_lightning._watch import watch_lightning

__all__ = [
    "assert_lightning_accumulation_equivalent",
    "assert_lightning_resume_equivalent",
    "check_lightning_accumulation_equivalent",
    "check_lightning_resume_equivalent",
    "from_lightning",
    "make_lightning_trainer",
    "watch_lightning",
]
