"""Losses, applied gradients and weights that are not finite."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, update


def _scaled(*, safe):
    """Add a logarithm of 0 in step 2, under a scaler that skips that update."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        inside = abs(2.0 - setup.step_index) + 0.0 * loss
        loss = loss + torch.log(inside.clamp(min=1e-3) if safe else inside)
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def _plain(*, safe):
    """Take the root of a sum of squares that is 0 in step 1, without a scaler."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        weight = setup.model.head.weight * (0.0 if setup.step_index == 1 else 1.0)
        loss = loss + (weight.square().sum() + (1e-6 if safe else 0.0)).sqrt()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    return step


def buggy():
    return {
        "a loss whose updates are skipped": case(_scaled(safe=False)),
        "gradients without a scaler": case(_plain(safe=False), one(scale=None)),
    }


def healthy():
    return {
        "a loss whose updates are skipped": case(_scaled(safe=True)),
        "gradients without a scaler": case(_plain(safe=True), one(scale=None)),
    }


def near_misses():
    def left_out(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch) * (float("nan") if setup.step_index == 1 else 1.0)
        if not torch.isfinite(loss):
            return loss.detach()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    def skipped(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if setup.step_index == 1:
            setup.model.head.weight.grad[0, 0] = float("inf")
        update(setup)
        return loss.detach()

    return {
        "a batch that is left out": case(left_out),
        "one update that the scaler skips": case(skipped, steps=8),
    }


MESSAGES = {
    "a loss whose updates are skipped": """\
Mixed precision training: failed, 1 finding

[non-finite] the loss was not finite in step 2 (loss -inf), and backward() ran on it: the GradScaler skipped this \
update, and no scale helps against it
  cause: log at non_finite.py:16 turned finite values into Inf in step 2, before anything else did: the logarithm \
of 0; MulBackward0 (the backward of non_finite.py:15) then made NaN of infinities
  fix: clamp its input (`x.clamp(min=1e-8).log()`), or use log_softmax, logsigmoid or log1p

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     2.165  2.288      0.1144  0.05  1          256
  1     3.62   3.952      0.1976  0.05  1          256
  2     -inf   -          -       0.05  0          128
  3     2.233  2.611      0.1306  0.05  1          128""",
    "gradients without a scaler": """\
Mixed precision training: failed, 1 finding

[non-finite] the loss was not finite in steps 2-3 (loss nan); gradients that were not finite were applied in steps \
1-3, first those of head.weight; all 4 parameters held NaN or Inf at the end of the run
  cause: SqrtBackward0 (the backward of non_finite.py:31) turned finite values into Inf in step 1, before anything \
else did: its slope is infinite at 0; PowBackward0 (the backward of non_finite.py:31) then made NaN of infinities
  fix: add an epsilon inside (`(x + 1e-8).sqrt()`)

Telemetry:
  step  loss   grad norm  update  lr    opt steps
  0     2.128  2.556      0.1278  0.05  1
  1     3.59   nan        nan     0.05  1
  2     nan    nan        nan     0.05  1
  3     nan    nan        nan     0.05  1""",
}
