"""What a GradScaler says of itself, without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_scale(scaler: Any) -> Tensor | None:
    """Return the scale as the 0-dim tensor that the scaler keeps; None without one, or before its first ``scale()``."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else None


def scaler_stage(scaler: Any, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return how far the scaler is with an optimizer: ``"ready"`` (gradients scaled), ``"unscaled"`` or ``"stepped"``.

    None without a scaler, with a disabled one, and with one of another make that does not keep torch's states.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None or not scaler.is_enabled():
        return None
    state = states.get(id(optimizer))
    return "ready" if state is None else str(state["stage"].name).lower()
