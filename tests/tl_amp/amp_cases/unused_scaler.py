"""A scaler that is built and never used."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain, scaler_of

from tl_core import TrainingSetup


def _step(dtype):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch, dtype)
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    return step


def _used(dtype):
    return case(lambda setup, batch: plain(setup, batch, dtype))


def buggy():
    return {
        "float16": case(_step(torch.float16)),
        "bfloat16": case(_step(torch.bfloat16)),
    }


def healthy():
    return {"float16": _used(torch.float16), "bfloat16": _used(torch.bfloat16)}


NOTED = {"disabled": ("not-judged",), "for the second half of the training": ()}


def near_misses():
    def make_disabled():
        setup = one()()
        setup.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return setup

    def make_late():
        setup = one()()
        return TrainingSetup(setup.model, setup.optimizer, scaler=scaler_of())

    def late(setup, batch):
        return plain(setup, batch) if setup.step_index >= 2 else _step(torch.bfloat16)(setup, batch)

    def by_its_number(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        scale = setup.scaler.get_scale()
        (loss * scale).backward()
        for parameter in setup.model.parameters():
            parameter.grad.div_(scale)
        setup.optimizer.step()
        return loss.detach()

    return {
        "disabled": case(_step(torch.bfloat16), make_disabled),
        "none": case(_step(torch.bfloat16), one(scale=None)),
        "for the second half of the training": case(late, make_late),
        "only asked for its scale": case(by_its_number),
    }


MESSAGES = {
    "float16": """\
Mixed precision training: failed, 1 finding

[unused-scaler] the setup has an enabled GradScaler, and the loop never used it in 4 steps: no loss was scaled, and \
'optimizer' stepped without it (unused_scaler.py:16)
  cause: scaler.scale(loss) and scaler.step(optimizer) are missing: gradients below 6e-8, the smallest float16 \
number, become 0 on their way through float16 operations
  fix: write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(); where none is needed \
(bfloat16, float32), leave the scaler out of the setup, or build it with enabled=False

Telemetry:
  step  loss   grad norm  update  lr    opt steps
  0     1.471  2.283      0.1141  0.05  1
  1     3.621  3.954      0.1977  0.05  1
  2     4.978  5.949      0.2975  0.05  1
  3     1.873  2.647      0.1323  0.05  1""",
    "bfloat16": """\
Mixed precision training: failed, 1 finding

[unused-scaler] the setup has an enabled GradScaler, and the loop never used it in 4 steps: no loss was scaled, and \
'optimizer' stepped without it (unused_scaler.py:16)
  cause: scaler.scale(loss) and scaler.step(optimizer) are missing
  fix: write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(); where none is needed \
(bfloat16, float32), leave the scaler out of the setup, or build it with enabled=False

Telemetry:
  step  loss   grad norm  update  lr    opt steps
  0     1.472  2.288      0.1144  0.05  1
  1     3.62   3.952      0.1976  0.05  1
  2     4.979  5.949      0.2975  0.05  1
  3     1.874  2.645      0.1323  0.05  1""",
}
