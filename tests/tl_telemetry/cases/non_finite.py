"""A value that is not finite: the square root of 0, whose slope is infinite."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[non-finite] the loss was not finite in steps 1-5 (loss nan); gradients that were not finite were applied in steps \
0-5, first those of all 2 parameters; all 2 parameters held NaN or Inf at the end of the run
  cause: SqrtBackward0 (the backward of non_finite.py:42) turned finite values into Inf in step 0, before anything \
else did: its slope is infinite at 0; PowBackward0 (the backward of non_finite.py:42) then made NaN of infinities
  fix: add an epsilon inside (`(x + 1e-8).sqrt()`)"""


def _case(loss_fn: Any, lr: float = 0.05, data: Any = (X, Y), dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1).to(dtype)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))

    def step(setup: TrainingSetup, batch: Any) -> Any:
        setup.optimizer.zero_grad()
        loss = loss_fn(setup.model(batch[0].to(dtype)), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def _distance(epsilon: float) -> dict[str, Any]:
    def loss_fn(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # the distance of each prediction to itself is 0
        return ((made - made.detach()).square() + epsilon).sqrt().mean() + (made - y).square().mean()

    return _case(loss_fn)


def buggy() -> dict[str, Any]:
    return _distance(0.0)


def healthy() -> dict[str, Any]:
    return _distance(1e-8)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a mask of -inf": _case(_masked),
        "a mask of -inf made by a logarithm": _case(_masked_by_log),
        "a finite gradient of 1e30": _case(lambda made, y: 1e30 * (made - y).square().mean(), lr=1e-32),
        "targets that are missing as NaN, left out": _case(_missing_targets, data=(X, _with_nan(Y))),
        "a GradScaler that skips overflows": _scaled(),
        "a buffer of -inf": _causal(),
        "a mask made in the first forward pass": _causal(lazily=True),
        "a guard that skips a bad batch": _guarded(_skip_backward),
        "a guard that clears what a bad batch left": _guarded(_skip_update),
        "a mean over nothing, replaced": _case(lambda made, y: made[:0].mean().nan_to_num() + made.square().mean()),
    }


def _guarded(train: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        train(setup, loss)
        return loss.detach()

    return {"make_setup": make_setup, "data": [(X, Y), (X, Y), (X, _with_nan(Y)), (X, Y)], "step": step, "steps": 8}


def _skip_backward(setup: TrainingSetup, loss: torch.Tensor) -> None:
    if torch.isfinite(loss):
        loss.backward()
        setup.optimizer.step()


def _skip_update(setup: TrainingSetup, loss: torch.Tensor) -> None:
    loss.backward()
    if all(p.grad.isfinite().all() for p in setup.model.parameters()):
        setup.optimizer.step()


def _masked(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = (made @ made.T).masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(1) @ made - y).square().mean()


def _masked_by_log(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = made @ made.T + torch.ones(16, 16).tril().log()
    return (scores.softmax(1) @ made - y).square().mean()


def _with_nan(y: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(16).unsqueeze(1) % 4 == 0, torch.nan, y)


def _missing_targets(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    there = ~y.isnan()
    return (made[there] - y[there]).square().mean()


def _scaled() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.01)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.001), scaler=scaler)

    def step(setup: TrainingSetup, batch: Any) -> dict[str, torch.Tensor]:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        setup.scaler.scale(40.0 * loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        norm = nn.utils.clip_grad_norm_(setup.model.parameters(), 1000.0)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return {"loss": loss, "grad_norm": norm}

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


class _Causal(nn.Module):
    def __init__(self, lazily: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)
        if not lazily:
            self.register_buffer("mask", self.make())

    @staticmethod
    def make() -> torch.Tensor:
        return torch.full((16, 16), -torch.inf).triu(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", self.make())
        made = self.body(x)
        return F.softmax(made @ made.T + self.mask, dim=1) @ made


def _causal(lazily: bool = False) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _Causal(lazily)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}
