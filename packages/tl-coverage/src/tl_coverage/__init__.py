"""Check which optimizer updates which parameter, without running a step."""

from tl_coverage._check import assert_optimizer_coverage, check_optimizer_coverage

__all__ = ["assert_optimizer_coverage", "check_optimizer_coverage"]
