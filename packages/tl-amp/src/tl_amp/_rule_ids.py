"""The ids of the rules of this check. Each has an entry in docs/rules.md."""

from __future__ import annotations

AMP_FINDINGS = (
    "stepped-past-scaler",
    "unused-scaler",
    "loss-not-scaled",
    "scaled-twice",
    "unscaled-in-part",
    "unscaled-twice",
    "unscaled-again",
    "missing-update",
    "extra-update",
    "update-between-steps",
    "stepped-twice",
    "scaler-refuses",
    "backward-after-unscale",
    "scale-changed-between",
    "overflow-hidden",
    "clip-before-unscale",
    "depends-on-scale",
    "zeroed-before-step",
    "never-stepped",
    "float16-overflow",
    "non-finite",
    "skipped-updates",
    "moves-only-on-skipped",
    "ahead-of-updates",
    "low-precision-loss",
    "update-rounds-away",
)

# Worth knowing and perhaps meant: never a failure.
AMP_NOTES = (
    "moved-on-skipped",
    "float16-without-scaler",
    "static-scale",
    "not-judged",
)

# A finding hides what follows from it, unless that names parameters which the finding does not.
EXPLAINS = {
    "overflow-hidden": frozenset({"zeroed-before-step"}),
    "unscaled-in-part": frozenset({"stepped-past-scaler", "static-scale", "non-finite"}),
    "stepped-past-scaler": frozenset({"clip-before-unscale", "non-finite", "float16-overflow", "skipped-updates"}),
    "scaled-twice": frozenset({"skipped-updates", "clip-before-unscale"}),
    "loss-not-scaled": frozenset({"never-stepped", "update-rounds-away"}),
    "unscaled-again": frozenset({"update-between-steps", "skipped-updates", "missing-update", "extra-update"}),
    "update-between-steps": frozenset({"skipped-updates"}),
    "zeroed-before-step": frozenset({"skipped-updates", "never-stepped"}),
    "float16-overflow": frozenset({"skipped-updates", "moved-on-skipped", "ahead-of-updates"}),
    "non-finite": frozenset({"skipped-updates", "moved-on-skipped", "ahead-of-updates"}),
    "skipped-updates": frozenset({"moved-on-skipped", "ahead-of-updates"}),
    "moves-only-on-skipped": frozenset({"moved-on-skipped", "ahead-of-updates"}),
}
