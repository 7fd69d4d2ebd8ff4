"""Losses that are numbers in low precision themselves."""

from __future__ import annotations

import torch
from amp_loops import case, one, update
from torch.nn import functional


def _step(dtype, loss_of):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(setup.model(batch[0]), batch[1])
        if setup.scaler is None:
            loss.backward()
            setup.optimizer.step()
        else:
            setup.scaler.scale(loss).backward()
            update(setup)
        return loss.detach()

    return step


def as_they_are(outputs, targets):
    return (outputs - targets.to(outputs.dtype)).abs().mean()


def converted(outputs, targets):
    return (outputs.float() - targets).abs().mean()


def buggy():
    return {
        "float16": case(_step(torch.float16, as_they_are)),
        "bfloat16, without a scaler": case(_step(torch.bfloat16, as_they_are), one(scale=None)),
    }


def healthy():
    return {
        "float16": case(_step(torch.float16, converted)),
        "bfloat16, without a scaler": case(_step(torch.bfloat16, converted), one(scale=None)),
    }


def near_misses():
    def by_autocast(outputs, targets):
        return functional.mse_loss(outputs, targets)

    def with_wide_targets(outputs, targets):
        return (outputs - targets).abs().mean()

    return {
        "a function that autocast computes in float32": case(_step(torch.bfloat16, by_autocast)),
        "targets in float32": case(_step(torch.bfloat16, with_wide_targets)),
    }


MESSAGES = {
    "float16": """\
Mixed precision training: failed, 1 finding

[low-precision-loss] the loss that backward() at low_precision_loss.py:19 ran on is a float16 number (made by Mean) \
in 4 of 4 backward passes (steps 0-3)
  cause: the last operations of the loss are computed in float16: their sums keep about 3 digits, and they overflow \
beyond 65504
  fix: compute the loss in float32: convert the outputs first (`loss_fn(outputs.float(), targets)`)

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.064  1.012      0.05061  0.05  1          256
  1     1.644  0.9472     0.04736  0.05  1          256
  2     2.107  1.127      0.05633  0.05  1          256
  3     1.36   0.7055     0.03528  0.05  1          256""",
    "bfloat16, without a scaler": """\
Mixed precision training: failed, 1 finding

[low-precision-loss] the loss that backward() at low_precision_loss.py:16 ran on is a bfloat16 number in 4 of 4 \
backward passes (steps 0-3)
  cause: the last operations of the loss are computed in bfloat16: their sums keep about 2 digits
  fix: compute the loss in float32: convert the outputs first (`loss_fn(outputs.float(), targets)`)

Telemetry:
  step  loss   grad norm  update   lr    opt steps
  0     1.062  1.015      0.05074  0.05  1
  1     1.648  0.9499     0.04749  0.05  1
  2     2.109  1.129      0.05645  0.05  1
  3     1.359  0.7072     0.03536  0.05  1""",
}
