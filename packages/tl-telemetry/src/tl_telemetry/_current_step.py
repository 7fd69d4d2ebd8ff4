"""The step that runs, as the person sees it."""

from __future__ import annotations

from typing import Any

import torch

from tl_core import split_losses


class CurrentStep:
    """The step that runs: give it the loss (``s.loss = loss``), a scalar tensor, a float or a dict of named ones."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._losses: dict[str, torch.Tensor | float] = {}
        self._main_loss: str | None = None

    @property
    def loss(self) -> torch.Tensor | float | None:
        """The main loss; None before it is set."""
        return None if self._main_loss is None else self._losses[self._main_loss]

    @loss.setter
    def loss(self, value: Any) -> None:
        self._losses, self._main_loss = split_losses(value, self.index)
