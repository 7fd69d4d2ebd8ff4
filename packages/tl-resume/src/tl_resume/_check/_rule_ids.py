"""The ids of the rules of tl-resume's checks; docs/rules.md has an entry for each."""

from __future__ import annotations

# In the order in which findings are shown: what other findings may follow from comes first.
RESUME_FINDINGS = (
    "saving-changes-training",
    "parameter-order-varies",
    "optimizer-of-other-model",
    "checkpoint-by-reference",
    "other-weights-loaded",
    "restored-then-overwritten",
    "loaded-in-lower-precision",
    "model-not-restored",
    "optimizer-state-misplaced",
    "optimizer-state-not-restored",
    "param-groups-not-restored",
    "scheduler-not-restored",
    "scaler-not-restored",
    "state-not-restored",
    "trainable-not-restored",
    "gradients-not-restored",
    "modes-not-restored",
    "rng-not-restored",
    "generator-not-restored",
    "data-position-not-restored",
    "attribute-not-restored",
    "outside-state-not-restored",
    "step-not-restored",
    "fresh-process-differs",
    "resume-diverges",
)
RESUME_NOTES = ("unsaved-attribute", "resume-moved", "not-repeatable", "not-copied", "not-judged")
