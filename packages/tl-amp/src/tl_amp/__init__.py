"""Check that a PyTorch training loop uses mixed precision, and its GradScaler, right."""

from tl_amp._check import assert_mixed_precision_training, check_mixed_precision_training
from tl_amp._rule_ids import AMP_FINDINGS, AMP_NOTES

__all__ = [
    "AMP_FINDINGS",
    "AMP_NOTES",
    "assert_mixed_precision_training",
    "check_mixed_precision_training",
]
