"""Schedulers that step only where an update is skipped."""

from __future__ import annotations

import torch
from amp_loops import case, one, plain
from torch.optim.lr_scheduler import LambdaLR, StepLR


def _rate(optimizer):
    return LambdaLR(optimizer, lambda count: 1.0 / (1.0 + 0.1 * count))


def _step(guard):
    def step(setup, batch):
        before = setup.scaler.get_scale() if setup.step_index else 2.0**19
        loss = plain(setup, batch, torch.float16)
        if guard(setup.scaler.get_scale(), before):
            setup.scheduler.step()
        return loss

    return step


SETUP = {"scale": 2.0**19, "schedule": _rate, "lr": 0.01}


def buggy():
    return {"a guard that is the wrong way round": case(_step(lambda now, before: now < before), one(**SETUP), steps=8)}


def healthy():
    return {
        "a guard that is the wrong way round": case(_step(lambda now, before: now >= before), one(**SETUP), steps=8)
    }


def near_misses():
    def by_the_epoch(setup, batch):
        loss = plain(setup, batch, torch.float16)
        if setup.step_index % 4 == 0:
            setup.scheduler.step()
        return loss

    return {
        "once an epoch": case(by_the_epoch, one(scale=2.0**17, schedule=lambda o: StepLR(o, 1), lr=0.01), steps=8),
        "only at the end of the warm-up of the scale": case(
            _step(lambda now, before: False), one(scale=2.0**19, lr=0.01, schedule=_rate), steps=8
        ),
    }


MESSAGES = {
    "a guard that is the wrong way round": """\
Mixed precision training: failed, 1 finding

[moves-only-on-skipped] scheduler 'scheduler' stepped only where the GradScaler skipped the update (steps 0-3), and \
in none of 4 updates that were made
  cause: the condition that guards scheduler.step() is the wrong way round: the scale falls where an update is \
skipped, and stays or grows where it is made
  fix: `before = scaler.get_scale(); scaler.step(optimizer); scaler.update()`, then scheduler.step() only if \
`scaler.get_scale() >= before`

Telemetry:
  step  loss   grad norm  update   lr        opt steps  scale
  0     1.471  -          -        0.009091  0          2.621e+05
  1     3.913  -          -        0.008333  0          1.311e+05
  2     6.599  -          -        0.007692  0          6.554e+04
  3     2.651  -          -        0.007143  0          3.277e+04
  4     1.553  2.454      0.01753  0.007143  1          3.277e+04
  5     2.313  2.535      0.01811  0.007143  1          3.277e+04
  6     1.418  2.225      0.01589  0.007143  1          3.277e+04
  7     3.784  4.115      0.02939  0.007143  1          3.277e+04""",
}
