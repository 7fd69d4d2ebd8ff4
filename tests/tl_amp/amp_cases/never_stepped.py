"""Optimizers that no scaler.step() is called for."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain, two, update


def _step(names):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for name in names:
            setup.scaler.step(setup.optimizers[name])
        setup.scaler.update()
        return loss.detach()

    return step


def _guarded(*, early):
    """Overflow at every scale that is tried, and leave on that before the scaler can lower it."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch, torch.float16)
        setup.scaler.scale(loss).backward()
        grads = [parameter.grad for parameter in setup.model.parameters()]
        if early and not all(grad.isfinite().all() for grad in grads):
            return loss.detach()
        update(setup)
        return loss.detach()

    return step


def _alone(*, steps):
    """Unscale and update, and step or not."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        if steps:
            setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "the only one": case(_alone(steps=False)),
        "a guard before scaler.update()": case(_guarded(early=True), one(scale=2.0**20, lr=0.01), steps=8),
        "one of two": case(_step(("body",)), two()),
    }


def healthy():
    return {
        "the only one": case(_alone(steps=True)),
        "a guard before scaler.update()": case(_guarded(early=False), one(scale=2.0**20, lr=0.01), steps=8),
        "one of two": case(_step(("body", "head")), two()),
    }


def near_misses():
    def in_turns(setup, batch):
        return _step(("body",) if setup.step_index % 2 else ("head",))(setup, batch)

    def now_and_then(setup, batch):
        return _step(("body", "head") if setup.step_index % 2 else ("body",))(setup, batch)

    return {
        "in turns": case(in_turns, two()),
        "one of them every second time": case(now_and_then, two()),
        "both": case(plain, two()),
    }


MESSAGES = {
    "the only one": """\
Mixed precision training: failed, 1 finding

[never-stepped] 'optimizer' never stepped in 4 steps, although 4 backward passes gave gradients to all 4 \
parameters; nothing else moved them
  cause: undecided: scaler.step() is not called for it, the condition under which it is called is never true (`i % \
k == k`), or the run is shorter than one of its cycles
  fix: call scaler.step(optimizer); if it is due only after more than 4 steps, run more

Notes:
[not-judged] no optimizer stepped in 4 steps: what an update shows could not be judged
  fix: run at least one whole accumulation cycle

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.472  0.05  0          256
  1     3.916  0.05  0          256
  2     6.604  0.05  0          256
  3     2.652  0.05  0          256""",
    "a guard before scaler.update()": """\
Mixed precision training: failed, 1 finding

[never-stepped] 'optimizer' never stepped in 8 steps, although 8 backward passes gave gradients to all 4 \
parameters; nothing else moved them
  cause: the gradients held Inf or NaN after each of 8 backward passes, at a scale of 1048576, and the loop left \
before scaler.step() and scaler.update(): nothing lowers the scale
  fix: leave the guard to the scaler: call scaler.step() and scaler.update() in every update; it skips the step and \
lowers its scale

Notes:
[not-judged] no optimizer stepped in 8 steps: what an update shows could not be judged
  fix: run at least one whole accumulation cycle

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.471  0.01  0          1.049e+06
  1     3.913  0.01  0          1.049e+06
  2     6.599  0.01  0          1.049e+06
  3     2.651  0.01  0          1.049e+06
  4     1.553  0.01  0          1.049e+06
  5     2.327  0.01  0          1.049e+06
  6     1.471  0.01  0          1.049e+06
  7     3.913  0.01  0          1.049e+06""",
    "one of two": """\
Mixed precision training: failed, 1 finding

[never-stepped] 'head' never stepped in 4 steps, although 4 backward passes gave gradients to head.* (2 tensors); \
nothing else moved them
  cause: scaler.step() is called for 'body' only (never_stepped.py:15)
  fix: call scaler.step(head) as well, before the one scaler.update() of the step

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  lr head  opt steps head  scale
  0     1.472  1.07            0.05352      0.05     1               0.05     0               256
  1     3.859  2.437           0.1219       0.05     1               0.05     0               256
  2     6.212  3.585           0.1793       0.05     1               0.05     0               256
  3     2.303  1.914           0.09571      0.05     1               0.05     0               256""",
}
