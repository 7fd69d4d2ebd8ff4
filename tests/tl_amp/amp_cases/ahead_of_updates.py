"""Schedulers and averages that move on though many updates are skipped."""

from __future__ import annotations

import torch
from amp_loops import always, applied, averaging, case, decaying, moving, one, plain
from torch.optim.lr_scheduler import ReduceLROnPlateau

START = 2.0**19


class OwnAverage:
    """An exponential average of the weights, written out."""

    def __init__(self, model):
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update_parameters(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return dict(self.shadow)


def _both(guard):
    step = moving(guard, START)
    return {
        "an average of its own": case(step, one(scale=START, average=OwnAverage, lr=0.01), steps=8),
        "a scheduler": case(step, one(scale=START, schedule=decaying, lr=0.01), steps=8),
        "an average of the weights": case(step, one(scale=START, average=averaging, lr=0.01), steps=8),
    }


def buggy():
    return _both(always)


def healthy():
    return _both(applied)


def near_misses():
    def plateau(setup, batch):
        loss = plain(setup, batch, torch.float16)
        if setup.step_index % 4 == 1:
            setup.scheduler.step(loss)
        return loss

    low = 2.0**10
    return {
        "a plateau, once in four steps": case(plateau, one(scale=START, schedule=ReduceLROnPlateau, lr=0.01), steps=8),
        "nothing is skipped": case(moving(always, low), one(scale=low, schedule=decaying, lr=0.01), steps=8),
    }


MESSAGES = {
    "an average of its own": """\
Mixed precision training: failed, 1 finding

[ahead-of-updates] setup.state['average'] (OwnAverage) moved 4 times in steps whose update the GradScaler skipped \
(steps 0-3): it is 4 of 8 updates ahead of the weights
  cause: it is updated once an update, also where scaler.step() skips the optimizer's step
  fix: go on only where the update was made: the scale falls where it was skipped (`before = scaler.get_scale(); \
scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.471  -          -        0.01  0          2.621e+05
  1     3.913  -          -        0.01  0          1.311e+05
  2     6.599  -          -        0.01  0          6.554e+04
  3     2.651  -          -        0.01  0          3.277e+04
  4     1.553  2.454      0.02454  0.01  1          3.277e+04
  5     2.307  2.535      0.02535  0.01  1          3.277e+04
  6     1.398  2.202      0.02202  0.01  1          3.277e+04
  7     3.735  4.075      0.04075  0.01  1          3.277e+04""",
    "a scheduler": """\
Mixed precision training: failed, 1 finding

[ahead-of-updates] scheduler 'scheduler' moved 4 times in steps whose update the GradScaler skipped (steps 0-3): it \
is 4 of 8 updates ahead of the weights
  cause: its step() runs once an update, also where scaler.step() skips the optimizer's step
  fix: go on only where the update was made: the scale falls where it was skipped (`before = scaler.get_scale(); \
scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)

Telemetry:
  step  loss   grad norm  update   lr        opt steps  scale
  0     1.471  -          -        0.009091  0          2.621e+05
  1     3.913  -          -        0.008333  0          1.311e+05
  2     6.599  -          -        0.007692  0          6.554e+04
  3     2.651  -          -        0.007143  0          3.277e+04
  4     1.553  2.454      0.01753  0.007143  1          3.277e+04
  5     2.313  2.535      0.0169   0.006667  1          3.277e+04
  6     1.42   2.226      0.01391  0.00625   1          3.277e+04
  7     3.792  4.121      0.02424  0.005882  1          3.277e+04""",
    "an average of the weights": """\
Mixed precision training: failed, 1 finding

[ahead-of-updates] setup.state['average'] (AveragedModel) moved 4 times in steps whose update the GradScaler \
skipped (steps 0-3): it is 4 of 8 updates ahead of the weights
  cause: it is updated once an update, also where scaler.step() skips the optimizer's step
  fix: go on only where the update was made: the scale falls where it was skipped (`before = scaler.get_scale(); \
scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.471  -          -        0.01  0          2.621e+05
  1     3.913  -          -        0.01  0          1.311e+05
  2     6.599  -          -        0.01  0          6.554e+04
  3     2.651  -          -        0.01  0          3.277e+04
  4     1.553  2.454      0.02454  0.01  1          3.277e+04
  5     2.307  2.535      0.02535  0.01  1          3.277e+04
  6     1.398  2.202      0.02202  0.01  1          3.277e+04
  7     3.735  4.075      0.04075  0.01  1          3.277e+04""",
}
