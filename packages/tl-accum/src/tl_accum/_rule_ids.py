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
    "zeroed-per-micro-batch",
    "clip-per-micro-batch",
    "gradient-edited",
    "loss-not-divided",
    "loss-divided-twice",
    "wrong-loss-scale",
    "constant-term",
    "mean-of-means",
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
    "hidden-scale",
    "carried-over",
    "buffers-per-forward",
    "low-precision",
    "noise",
    "not-judged",
)
