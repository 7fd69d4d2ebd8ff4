"""The ids of the accumulation check's rules. Each has an entry in docs/rules.md."""

from __future__ import annotations

FINDINGS = (
    "never-updates",
    "premature-update",
    "missing-update",
    "extra-update",
    "last-group-dropped",
    "last-group-leaks",
    "last-group-scale",
    "previous-cycle-kept",
    "other-loss-kept",
    "zeroed-per-micro-batch",
    "micro-batch-without-backward",
    "clip-per-micro-batch",
    "gradient-edited",
    "loss-scale-changed",
    "loss-not-divided",
    "loss-divided-twice",
    "wrong-loss-scale",
    "constant-term",
    "mean-of-means",
    "unequal-micro-batches",
    "coupled-samples",
    "clip-differs",
    "gradients-differ",
    "scheduler-steps",
    "settings-differ",
    "moved-per-micro-batch",
    "state-per-micro-batch",
    "weights-differ",
)

# Worth knowing and perhaps meant: never a failure.
NOTES = (
    "clip-without-effect",
    "edit-without-effect",
    "hidden-scale",
    "carried-over",
    "buffers-per-forward",
    "low-precision",
    "noise",
    "not-judged",
)
