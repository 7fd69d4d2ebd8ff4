"""Schedulers that step only where an update is skipped."""

from __future__ import annotations

from amp_loops import applied, case, decaying, moving, one
from torch.optim.lr_scheduler import StepLR

START = 2.0**19
SETUP = {"scale": START, "schedule": decaying, "lr": 0.01}


def buggy():
    return {
        "a guard that is the wrong way round": case(
            moving(lambda now, before: now < before, START), one(**SETUP), steps=8
        )
    }


def healthy():
    return {"a guard that is the wrong way round": case(moving(applied, START), one(**SETUP), steps=8)}


def near_misses():
    def seldom(start):
        calls = iter(range(1000))
        return moving(lambda now, before: next(calls) % 4 == 0, start)

    epochs = {"schedule": lambda optimizer: StepLR(optimizer, 1), "lr": 0.01}
    return {
        "once an epoch": case(seldom(2.0**17), one(scale=2.0**17, **epochs), steps=8),
        "never yet": case(moving(lambda now, before: False, START), one(**SETUP), steps=8),
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
