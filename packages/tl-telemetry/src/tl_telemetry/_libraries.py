"""Packages that are never the person's own code, wherever they lie."""

from __future__ import annotations

# torch may be a checkout in the person's folders, and so may these packages
NEVER_OWN = frozenset(
    f"tl_{name}"
    for name in ("core", "coverage", "telemetry", "resume", "accum", "amp", "eval", "lightning", "hf", "pytest")
) | {"torch", "torchdata", "torchvision", "torchaudio"}
