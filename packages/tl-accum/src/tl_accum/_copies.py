"""Copies of tensors, shared by captures between which a tensor stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Keeps tensors' contents for captures, on the CPU.

    Most of what a loop holds stays as it is from one micro-batch to the next: a dataset, and without an update the
    weights and the optimizer's state. Comparing a tensor with its last copy costs less time than another copy, and no
    memory.
    """

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Tensor, bytes]] = {}
        self._now: dict[Any, tuple[Tensor, bytes]] = {}
        self._count = 0

    def begin(self) -> None:
        """Begin a capture: only what the one before it held is remembered."""
        self._last, self._now = self._now, {}

    def keep(self, tensor: Tensor) -> tuple[Callable[[], Tensor], bytes]:
        """Return what gives the content back, and a digest: the same one for the same copy."""
        tensor = tensor.detach()
        # memory may be used again by another tensor, which is then told by its content
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        content = tensor.to("cpu")
        held = self._last.get(place) or self._now.get(place)
        # torch compares no complex32
        if held is None or content.dtype is torch.complex32 or not torch.equal(held[0], content):
            self._count += 1
            copied = content.clone() if content.data_ptr() == tensor.data_ptr() else content
            held = copied, self._count.to_bytes(8, "big")
        self._now[place] = held
        copied, digest = held
        return lambda: copied, digest
