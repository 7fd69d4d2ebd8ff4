"""Prove that gradient accumulation makes the update that the big batch makes, and name what differs."""

from tl_accum._assert import assert_accumulation_equivalent, check_accumulation_equivalent
from tl_accum._report import AccumulationReport
from tl_accum._rule_ids import FINDINGS as ACCUM_FINDINGS
from tl_accum._rule_ids import NOTES as ACCUM_NOTES
from tl_accum._split import split_batch

__all__ = [
    "ACCUM_FINDINGS",
    "ACCUM_NOTES",
    "AccumulationReport",
    "assert_accumulation_equivalent",
    "check_accumulation_equivalent",
    "split_batch",
]
