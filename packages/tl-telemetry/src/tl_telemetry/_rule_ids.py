"""The ids of all rules that a run is judged by. Each has an entry in docs/rules.md."""

from __future__ import annotations

# Rules about which optimizer updates which parameter; tl_coverage finds them.
COVERAGE = (
    "uncovered-parameter",
    "listed-twice",
    "other-copy",
    "replaced-layer",
    "foreign-tensor",
    "shared-memory",
)

FINDINGS = (
    *COVERAGE,
    "loss-not-connected",
    "zeroed-before-step",
    "discarded-gradient",
    "missing-zero-grad",
    "backward-twice",
    "leaked-gradient",
    "no-gradient",
    "zero-gradient",
    "step-without-gradient",
    "repeated-step",
    "stepped-by-two",
    "never-stepped",
    "lr-zero",
    "no-update",
    "update-rounds-away",
    "frozen-moved",
    "clip-after-step",
    "clip-misses",
    "scheduler-stepped-twice",
    "scheduler-before-optimizer",
    "orphan-scheduler",
    "frozen-buffer-moved",
    "ema-never-updated",
    "graph-kept-alive",
    "loss-broadcast",
    "non-finite",
    "grad-norm-exceeded",
    "diverging",
    "skipped-update",
    "lr-unexpected",
    "loss-not-decreasing",
    "update-count",
)

# Worth knowing and perhaps meant: never a failure unless ``strict`` names them.
NOTES = (
    "frozen-parameter",
    "never-ran",
    "several-optimizers",
    "clip-every-update",
    "group-lr-zero",
    "scheduler-never-stepped",
    "scheduler-too-often",
    "schedule-horizon",
    "static-state",
    "torch-warning",
    "not-judged",
)

RULES = (*FINDINGS, *NOTES)
