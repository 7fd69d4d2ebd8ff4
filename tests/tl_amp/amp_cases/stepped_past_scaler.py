"""Optimizers that step directly, with gradients of a scaled loss."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, two, update
from torch.nn.utils import clip_grad_norm_


def _step(through, *, update):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for name, optimizer in setup.optimizers.items():
            if name in through:
                setup.scaler.step(optimizer)
            else:
                optimizer.step()
        if update:
            setup.scaler.update()
        return loss.detach()

    return step


def _unscaled(through):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        if through:
            setup.scaler.step(setup.optimizer)
        else:
            setup.optimizer.step()
        setup.scaler.update()
        return loss.detach()

    return step


def _clipped(*, through):
    """Clip before unscaling, or after it: a step past the scaler hides that."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if through:
            setup.scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        if through:
            update(setup)
        else:
            setup.optimizer.step()
        return loss.detach()

    return step


def buggy():
    return {
        "after a clip": case(_clipped(through=False), one(torch.optim.Adam)),
        "without an update": case(_step((), update=False)),
        "with an update, which raises": case(_step((), update=True)),
        "one of two optimizers": case(_step(("body",), update=True), two()),
        "after unscale_": case(_unscaled(through=False)),
    }


def healthy():
    return {
        "after a clip": case(_clipped(through=True), one(torch.optim.Adam)),
        "without an update": case(_step(("optimizer",), update=True)),
        "with an update, which raises": case(_step(("optimizer",), update=True)),
        "one of two optimizers": case(_step(("body", "head"), update=True), two()),
        "after unscale_": case(_unscaled(through=True)),
    }


def near_misses():
    def divided(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for parameter in setup.model.parameters():
            parameter.grad.data.mul_(1.0 / setup.scaler.get_scale())
        setup.optimizer.step()
        return loss.detach()

    def not_scaled(setup, batch):
        body, head = setup.optimizers.values()
        hidden = setup.model.body(batch[0])
        body.zero_grad()
        setup.scaler.scale(hidden.square().mean()).backward()
        setup.scaler.step(body)
        setup.scaler.update()
        head.zero_grad()
        loss = (setup.model.head(hidden.detach()) - batch[1]).square().mean()
        loss.backward()
        head.step()
        return loss.detach()

    def guarded(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss * (float("inf") if setup.step_index == 2 else 1.0)).backward()
        setup.scaler.unscale_(setup.optimizer)
        if clip_grad_norm_(setup.model.parameters(), 1.0).isfinite():
            setup.optimizer.step()
        setup.scaler.update()
        return loss.detach()

    return {
        "divided by hand": case(divided),
        "a part whose loss is not scaled": case(not_scaled, two()),
        "unscaled, with a guard of its own": case(guarded),
    }


MESSAGES = {
    "after a clip": """\
Mixed precision training: failed, 1 finding

[stepped-past-scaler] 'optimizer' was stepped directly at stepped_past_scaler.py:57 in 4 of 4 updates (steps 0-3), \
on the scaled gradients of a loss that the GradScaler had multiplied by 256 (backward at stepped_past_scaler.py:50)
  cause: optimizer.step() bypasses the scaler: nothing divided the gradients by the scale, so they are 256 times \
too large, and NaN or Inf in them are applied
  fix: call scaler.step(optimizer) instead of its step() at stepped_past_scaler.py:57, and scaler.update() once \
after all optimizers have stepped

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  585.8 → 1  0.45    0.05  1          256
  1     3.179  895.4 → 1  0.3678  0.05  1          256
  2     3.722  1174 → 1   0.3529  0.05  1          256
  3     1.728  699.3 → 1  0.3038  0.05  1          256""",
    "without an update": """\
Mixed precision training: failed, 1 finding

[stepped-past-scaler] 'optimizer' was stepped directly at stepped_past_scaler.py:19 in 4 of 4 updates (steps 0-3), \
on the scaled gradients of a loss that the GradScaler had multiplied by 256 (backward at stepped_past_scaler.py:14)
  cause: optimizer.step() bypasses the scaler: nothing divided the gradients by the scale, so they are 256 times \
too large, and NaN or Inf in them are applied
  fix: call scaler.step(optimizer) instead of its step() at stepped_past_scaler.py:19, and scaler.update() once \
after all optimizers have stepped

Telemetry:
  step  loss       grad norm  update     lr    opt steps  scale
  0     1.472      585.8      29.29      0.05  1          256
  1     82.73      3.458e+04  1729       0.05  1          256
  2     3.283e+04  5.182e+05  2.591e+04  0.05  1          256
  3     4.567e+08  5.539e+09  2.769e+08  0.05  1          256""",
    "with an update, which raises": """\
Mixed precision training: failed, 1 finding

[stepped-past-scaler] 'optimizer' was stepped directly at stepped_past_scaler.py:19, on the scaled gradients of a \
loss that the GradScaler had multiplied by its scale: the GradScaler raised at stepped_past_scaler.py:21 in step 0 \
(No inf checks were recorded prior to update)
  cause: optimizer.step() bypasses the scaler: nothing divided the scaled gradients by the scale, or looked for NaN \
and Inf in them
  fix: call scaler.step(optimizer) instead of optimizer.step() at stepped_past_scaler.py:19

Telemetry:
  step  grad norm  update  lr    opt steps  scale
  0     585.8      29.29   0.05  1          256""",
    "one of two optimizers": """\
Mixed precision training: failed, 1 finding

[stepped-past-scaler] 'head' was stepped directly at stepped_past_scaler.py:19 in 4 of 4 updates (steps 0-3), on \
the scaled gradients of a loss that the GradScaler had multiplied by 256 (backward at stepped_past_scaler.py:14), \
while 'body' stepped through the scaler (stepped_past_scaler.py:17)
  cause: optimizer.step() bypasses the scaler: nothing divided the gradients by the scale, so they are 256 times \
too large, and NaN or Inf in them are applied
  fix: call scaler.step(head) instead of its step() at stepped_past_scaler.py:19, and scaler.update() once after \
all optimizers have stepped

Telemetry:
  step  loss       grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head  scale
  0     1.472      1.07            0.05352      0.05     1               517.8           25.89        0.05     1    \
           256
  1     449.5      902.8           45.14        0.05     1               1.127e+04       563.3        0.05     1    \
           256
  2     1.006e+06  3.052e+04       1526         0.05     1               1.595e+06       7.974e+04    0.05     1    \
           256
  3     2.611e+10  2.238e+09       1.119e+08    0.05     1               1.844e+08       9.222e+06    0.05     1    \
           256""",
    "after unscale_": """\
Mixed precision training: failed, 1 finding

[stepped-past-scaler] 'optimizer' was stepped directly at stepped_past_scaler.py:37 in 4 of 4 updates (steps 0-3), \
after scaler.unscale_() at stepped_past_scaler.py:32, and never through the scaler
  cause: optimizer.step() bypasses the scaler: unscale_() only notes the NaN and Inf that it finds, and it is \
scaler.step() that skips an update because of them; a direct step applies them
  fix: call scaler.step(optimizer) instead of its step() at stepped_past_scaler.py:37

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288 → 1  0.05    0.05  1          256
  1     3.784  4.103 → 1  0.05    0.05  1          256
  2     6.046  6.694 → 1  0.05    0.05  1          256
  3     2.418  2.655 → 1  0.05    0.05  1          256""",
}
