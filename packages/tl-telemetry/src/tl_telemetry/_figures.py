"""Figures that stay on the device: stacked to one tensor a step, read when somebody looks.

Nothing here waits for the device while a loop runs. On CUDA, the tensors of ``BLOCK_STEPS`` steps leave together in one
non-blocking copy to pinned memory; a figure read before that, or on another accelerator, copies its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

BLOCK_STEPS = 64

_dtype = attrgetter("dtype")
_device = attrgetter("device")
_layout = attrgetter("layout")


def common_dtype(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the dtype of real tensors that share it, on one device; None for others."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        return None
    dtype, _ = kinds.pop()
    return None if dtype.is_complex else dtype


class Row:
    """The figures of one step: float32 (or float64) of shape (num_figures,), on the device until it is read."""

    __slots__ = ("_arrived", "_values")

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._arrived: torch.Event | None = None

    def fill(self, values: Tensor) -> None:
        self._values = values

    def replace(self, values: Tensor, arrived: torch.Event) -> None:
        self._values, self._arrived = values, arrived

    def read(self, start: int, stop: int) -> list[float]:
        if self._values is None:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        if self._values.device.type != "cpu":
            self._values = self._values.cpu()
        return [float(value) for value in self._values[start:stop].tolist()]


class Span:
    """A run of figures in a step's row; ``values()`` is the first place that may wait for the device."""

    __slots__ = ("_row", "start", "stop")

    def __init__(self, row: Row, start: int, stop: int) -> None:
        self._row, self.start, self.stop = row, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def values(self) -> list[float]:
        """Return the figures as floats."""
        return self._row.read(self.start, self.stop)

    def value(self) -> float:
        """Return the only figure as a float."""
        return self._row.read(self.start, self.stop)[0]


class Figures:
    """Collects 0-dim tensors during a step and stacks them to one tensor when the step ends."""

    def __init__(self) -> None:
        self._row = Row()
        self._pending: list[Tensor] = []
        self._block: list[tuple[Row, Tensor]] = []

    def add(self, values: Sequence[Tensor]) -> Span:
        """Take 0-dim real tensors of any device and dtype; their values are read later."""
        start = len(self._pending)
        self._pending.extend(values)
        return Span(self._row, start, len(self._pending))

    def copy(self, value: object) -> Span | None:
        """Take a copy of a tensor that is written to in place later; None for anything else."""
        if not isinstance(value, Tensor):
            return None
        copy = value.detach().clone()
        return self.add([copy.reshape(()) if copy.dim() else copy])

    def root(self, roots: Sequence[object]) -> Span | None:
        """Take the value of the only root of a backward pass, if it is one real number."""
        root = roots[0] if len(roots) == 1 else None
        if not isinstance(root, Tensor) or root.numel() != 1 or root.is_complex():
            return None
        root = root.detach()
        return self.add([root.reshape(()) if root.dim() else root])

    def close_row(self) -> None:
        """Stack what was added since the last call."""
        if self._pending:
            values = _stack(self._pending)
            self._row.fill(values)
            if values.device.type == "cuda":
                self._block.append((self._row, values))
                if len(self._block) >= BLOCK_STEPS:
                    self.send_block()
            self._pending = []
        self._row = Row()

    def send_block(self) -> None:
        """Start the copy of the waiting rows to the host, without waiting for it."""
        if not self._block:
            return
        together = torch.cat([values for _, values in self._block])
        host = torch.empty(together.shape, dtype=together.dtype, device="cpu", pin_memory=True)
        host.copy_(together, non_blocking=True)
        arrived = torch.Event(device=together.device)
        arrived.record()
        offset = 0
        for row, values in self._block:
            row.replace(host[offset : offset + len(values)], arrived)
            offset += len(values)
        self._block = []


def _stack(values: list[Tensor]) -> Tensor:
    try:
        return torch.stack(values)
    except RuntimeError:
        # Figures of several devices (a model spread over them, a learning rate on the CPU) meet on an accelerator: a
        # non-blocking copy the other way would be read before it has arrived.
        device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
        return torch.stack([value.to(device, non_blocking=True) for value in values])


def norms(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the L2 norm of each tensor as a 0-dim tensor on its device, float32 (float64 for double precision).

    Sparse tensors are coalesced first, complex ones seen as pairs of reals. Non-finite elements give a non-finite norm.
    Call it under ``no_grad``.

    Args:
        tensors: of any layout, dtype and device.
        dtype: what they most likely all are, on one device, so that it is not asked of each; None if unknown.
    """
    if not tensors:
        return []
    if dtype is not None and tensors[0].dtype is dtype:
        try:
            return _norms_alike(tensors, dtype)
        except RuntimeError:  # sparse ones among them
            pass
    if len(set(map(_device, tensors))) == 1 and set(map(_layout, tensors)) == {torch.strided}:
        dtypes = set(map(_dtype, tensors))
        if len(dtypes) == 1 and not (only := dtypes.pop()).is_complex:
            return _norms_alike(tensors, only)
    plain = [_dense(tensor) for tensor in tensors]
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(plain):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    result: list[Tensor] = [plain[0]] * len(plain)
    for (own, _), indices in groups.items():
        for index, norm in zip(indices, _norms_alike([plain[i] for i in indices], own), strict=True):
            result[index] = norm
    return result


def _norms_alike(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    # float16 and bfloat16 sums overflow or lose their tail, so those are accumulated in float32
    if dtype in (torch.float32, torch.float64):
        return list(torch._foreach_norm(tensors, 2))
    if dtype not in (torch.float16, torch.bfloat16):  # float8 and the like know no arithmetic
        return _norms_alike([tensor.float() for tensor in tensors], torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor
