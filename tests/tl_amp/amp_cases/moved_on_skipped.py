"""A scheduler or an average that moved on a few skipped updates."""

from __future__ import annotations

import torch
from amp_loops import always, applied, averaging, case, decaying, moving, one, plain
from torch.optim.lr_scheduler import StepLR

START = 2.0**15


def _both(guard):
    step = moving(guard, START)
    return {
        "a scheduler": case(step, one(scale=START, schedule=decaying, lr=0.01), steps=12),
        "an average of the weights": case(step, one(scale=START, average=averaging, lr=0.01), steps=12),
    }


def buggy():
    return _both(always)


def healthy():
    return _both(applied)


def near_misses():
    def by_the_epoch(setup, batch):
        loss = plain(setup, batch, torch.float16)
        if setup.step_index % 6 == 2:
            setup.scheduler.step()
        return loss

    return {
        "once an epoch": case(by_the_epoch, one(scale=START, schedule=lambda o: StepLR(o, 1), lr=0.01), steps=12),
        "nothing is skipped": case(moving(always, 256.0), one(schedule=decaying, average=averaging), steps=12),
    }


MESSAGES = {
    "a scheduler": """\
Mixed precision training: passed, 1 note

Notes:
[moved-on-skipped] scheduler 'scheduler' moved 1 time in steps whose update the GradScaler skipped (step 2): it is \
1 of 12 updates ahead of the weights
  cause: its step() runs once an update, also where scaler.step() skips the optimizer's step
  fix: go on only where the update was made: the scale falls where it was skipped (`before = scaler.get_scale(); \
scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)""",
    "an average of the weights": """\
Mixed precision training: passed, 1 note

Notes:
[moved-on-skipped] setup.state['average'] (AveragedModel) moved 1 time in steps whose update the GradScaler skipped \
(step 2): it is 1 of 12 updates ahead of the weights
  cause: it is updated once an update, also where scaler.step() skips the optimizer's step
  fix: go on only where the update was made: the scale falls where it was skipped (`before = scaler.get_scale(); \
scaler.step(optimizer); scaler.update(); applied = scaler.get_scale() >= before`)""",
}
