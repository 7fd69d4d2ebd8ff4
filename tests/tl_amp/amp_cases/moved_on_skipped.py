"""A scheduler or an average that moved on a few skipped updates."""

from __future__ import annotations

import torch
from amp_loops import case, one, plain
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

START = 2.0**15


def _schedule(optimizer):
    return LambdaLR(optimizer, lambda count: 1.0 / (1.0 + 0.1 * count))


def _average(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _step(move, *, wait):
    def step(setup, batch):
        before = setup.scaler.get_scale() if setup.step_index else START
        loss = plain(setup, batch, torch.float16)
        if not wait or setup.scaler.get_scale() >= before:
            move(setup)
        return loss

    return step


def _both(*, wait):
    def scheduler(setup):
        setup.scheduler.step()

    def average(setup):
        setup.state["average"].update_parameters(setup.model)

    return {
        "a scheduler": case(_step(scheduler, wait=wait), one(scale=START, schedule=_schedule, lr=0.01), steps=12),
        "an average of the weights": case(
            _step(average, wait=wait), one(scale=START, average=_average, lr=0.01), steps=12
        ),
    }


def buggy():
    return _both(wait=False)


def healthy():
    return _both(wait=True)


def near_misses():
    def by_the_epoch(setup, batch):
        loss = plain(setup, batch, torch.float16)
        if setup.step_index % 6 == 0:
            setup.scheduler.step()
        return loss

    def nothing_skipped(setup, batch):
        loss = plain(setup, batch)
        setup.scheduler.step()
        return loss

    return {
        "once an epoch": case(by_the_epoch, one(scale=START, schedule=lambda o: StepLR(o, 1), lr=0.01), steps=12),
        "nothing is skipped": case(nothing_skipped, one(schedule=_schedule), steps=12),
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
