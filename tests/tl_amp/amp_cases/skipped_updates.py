"""Scalers that skip many updates."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, one, plain, scaler_of, two, update

from tl_core import TrainingSetup


def float16(setup, batch):
    return plain(setup, batch, torch.float16)


def _growing(interval):
    def make_setup():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return TrainingSetup(model, optimizer, scaler=scaler_of(2.0**15, growth_interval=interval))

    return make_setup


def _some(*, bad):
    """Get an infinite gradient in one parameter, in every second step."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if bad and setup.step_index % 2:  # only the head's
            setup.model.head.weight.grad[0, 0] = float("inf")
        update(setup)
        return loss.detach()

    return step


def _slope(*, safe):
    """Have a root whose slope at 0 is infinite, or a guard of the scaler's own way against NaN."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch) + (0.0 * setup.model.head.weight.sum() + (1e-6 if safe else 0.0)).sqrt()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def _loaded(*, every):
    """Load the state of the scaler in the first step, or in every step."""

    def step(setup, batch):
        if every or not setup.step_index:
            setup.scaler.load_state_dict({**setup.scaler.state_dict(), "scale": 2.0**18})
        return float16(setup, batch)

    return step


def buggy():
    return {
        "a scale that is loaded again and again": case(_loaded(every=True), one(lr=0.01), steps=8),
        "a scale that grows after each update": case(float16, _growing(1), steps=12),
        "a scale that never comes down": case(float16, one(scale=2.0**60), steps=6),
        "a slope that is infinite": case(_slope(safe=False)),
        "every second update": case(_some(bad=True), steps=8),
        "of one of two optimizers": case(_some(bad=True), two(), steps=8),
        "a scale that vanishes": case(_some(bad=True), one(scale=2.0), max_skipped_fraction=0.6, steps=8),
    }


def healthy():
    return {
        "a scale that is loaded again and again": case(_loaded(every=False), one(lr=0.01), steps=8),
        "a scale that grows after each update": case(float16, _growing(2000), steps=12),
        "a scale that never comes down": case(float16, one(scale=2.0**16), steps=6),
        "a slope that is infinite": case(_slope(safe=True)),
        "every second update": case(_some(bad=False), steps=8),
        "of one of two optimizers": case(_some(bad=False), two(), steps=8),
        "a scale that vanishes": case(_some(bad=False), one(scale=2.0), max_skipped_fraction=0.6, steps=8),
    }


def near_misses():
    def micro_batches(setup, batch):
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss / 4).backward()
        if setup.step_index % 4 == 3:
            update(setup)
            setup.optimizer.zero_grad()
        return loss.detach()

    def guarded(setup, batch):
        """Leave out updates whose gradients are too large, whatever the scaler says."""
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        if setup.step_index % 2:
            setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return {
        "a scale that starts too high": case(float16, one(scale=2.0**19, lr=0.01), steps=12),
        "micro-batches": case(micro_batches, steps=8),
        "a guard of the loop's own": case(guarded, steps=8),
        "as many as are allowed": case(_some(bad=True), one(scale=2.0**14), max_skipped_fraction=0.6, steps=8),
    }


MESSAGES = {
    "a scale that is loaded again and again": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped all 8 updates of 'optimizer' (steps 0-7; 100 %, at most 25 % are allowed); \
its scale went 262144 -> 131072 -> 262144 -> 131072 -> ... -> 262144 -> 131072
  cause: the scale was set back up between updates, 7 times (from 131072 to 262144 the first time), so that it \
never comes down to what fits: the scaler's state is loaded again, its update(new_scale) is given a number, or it \
is built anew
  fix: build the scaler once and load its state once, when a run is resumed; call update() without a number

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.471  0.01  0          1.311e+05
  1     3.913  0.01  0          1.311e+05
  2     6.599  0.01  0          1.311e+05
  3     2.651  0.01  0          1.311e+05
  4     1.553  0.01  0          1.311e+05
  5     2.327  0.01  0          1.311e+05
  6     1.471  0.01  0          1.311e+05
  7     3.913  0.01  0          1.311e+05""",
    "a scale that grows after each update": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped 5 of 12 updates of 'optimizer' for NaN or Inf in the gradients of head.* \
(2 tensors) (steps 1-2, 6-8; 42 %, at most 25 % are allowed); its scale went 32768 -> 65536 -> 32768 -> 16384 -> \
... -> 65536 -> 131072
  cause: AddmmBackward0 (the backward of amp_loops.py:26) turned finite values into Inf in step 8: scaled gradients \
overflow float16 there, again each time the scale has grown
  fix: let the scale grow less often (growth_interval, 2000 by default), compute this part in float32, or use \
bfloat16

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.471  2.283      0.02283  0.01  1          6.554e+04
  1     3.853  -          -        0.01  0          3.277e+04
  2     6.471  -          -        0.01  0          1.638e+04
  3     2.609  2.769      0.02769  0.01  1          3.277e+04
  4     1.474  2.376      0.02376  0.01  1          6.554e+04
  5     2.239  2.484      0.02484  0.01  1          1.311e+05
  6     1.313  -          -        0.01  0          6.554e+04
  7     3.682  -          -        0.01  0          3.277e+04
  8     6.142  -          -        0.01  0          1.638e+04
  9     2.462  2.686      0.02686  0.01  1          3.277e+04
  10    1.369  2.286      0.02286  0.01  1          6.554e+04
  11    2.126  2.402      0.02402  0.01  1          1.311e+05""",
    "a scale that never comes down": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped all 6 updates of 'optimizer' (steps 0-5; 100 %, at most 25 % are allowed); \
its scale went 1.15e+18 -> 5.76e+17 -> 2.88e+17 -> 1.44e+17 -> 7.21e+16 -> 3.6e+16 -> 1.8e+16
  cause: ToCopyBackward0 (the backward of amp_loops.py:64) turned finite values into Inf in step 5: scaled \
gradients overflow float16 there, and the scale is still too high
  fix: start from a lower scale (init_scale), or run more steps, until it fits

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.471  0.05  0          5.765e+17
  1     3.913  0.05  0          2.882e+17
  2     6.599  0.05  0          1.441e+17
  3     2.651  0.05  0          7.206e+16
  4     1.553  0.05  0          3.603e+16
  5     2.327  0.05  0          1.801e+16""",
    "a slope that is infinite": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped all 4 updates of 'optimizer' for NaN or Inf in the gradients of \
head.weight (steps 0-3; 100 %, at most 25 % are allowed); its scale went 256 -> 128 -> 64 -> 32 -> 16
  cause: SqrtBackward0 (the backward of skipped_updates.py:44) turned finite values into Inf in step 3, before \
anything else did: its slope is infinite at 0; MulBackward0 (the backward of skipped_updates.py:44) then made NaN \
of infinities
  fix: add an epsilon inside (`(x + 1e-8).sqrt()`)

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.472  0.05  0          128
  1     3.916  0.05  0          64
  2     6.604  0.05  0          32
  3     2.652  0.05  0          16""",
    "every second update": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped 4 of 8 updates of 'optimizer' for NaN or Inf in the gradients of \
head.weight (steps 1, 3, 5, 7; 50 %, at most 25 % are allowed); its scale went 256 -> 128 -> 64 -> 32 -> 16
  cause: undecided: an operation outside of its domain (sqrt or log of 0, division by 0), an overflow, data that \
holds NaN, or diverging weights
  fix: check the batch of that step, and run it under torch.autograd.detect_anomaly() to see the operation

Telemetry:
  step  loss    grad norm  update   lr    opt steps  scale
  0     1.472   2.288      0.1144   0.05  1          256
  1     3.62    -          -        0.05  0          128
  2     5.973   6.682      0.3341   0.05  1          128
  3     2.017   -          -        0.05  0          64
  4     0.8576  1.681      0.08403  0.05  1          64
  5     1.834   -          -        0.05  0          32
  6     0.7167  1.365      0.06825  0.05  1          32
  7     2.392   -          -        0.05  0          16""",
    "of one of two optimizers": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the GradScaler skipped 4 of 8 updates of 'head' for NaN or Inf in the gradients of head.weight \
(steps 1, 3, 5, 7; 50 %, at most 25 % are allowed); its scale went 256 -> 128 -> 64 -> 32 -> 16
  cause: undecided: an operation outside of its domain (sqrt or log of 0, division by 0), an overflow, data that \
holds NaN, or diverging weights
  fix: check the batch of that step, and run it under torch.autograd.detect_anomaly() to see the operation

Telemetry:
  step  loss    grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head  scale
  0     1.472   1.07            0.05352      0.05     1               2.023           0.1011       0.05     1       \
        256
  1     3.62    2.286           0.1143       0.05     1               -               -            0.05     0       \
        128
  2     5.728   3.491           0.1746       0.05     1               5.456           0.2728       0.05     1       \
        128
  3     1.941   2.045           0.1023       0.05     1               -               -            0.05     0       \
        64
  4     0.7896  0.8105          0.04053      0.05     1               1.443           0.07217      0.05     1       \
        64
  5     1.64    1.648           0.08242      0.05     1               -               -            0.05     0       \
        32
  6     0.6173  0.6677          0.03338      0.05     1               1.143           0.05716      0.05     1       \
        32
  7     2.053   1.73            0.08648      0.05     1               -               -            0.05     0       \
        16""",
    "a scale that vanishes": """\
Mixed precision training: failed, 1 finding

[skipped-updates] the loss scale fell to 0.125, below 1, where it makes nothing larger any more (2 -> 1 -> 0.5 -> \
0.25 -> 0.125): the GradScaler skipped 4 of 8 updates of 'optimizer' for NaN or Inf in the gradients of head.weight \
(steps 1, 3, 5, 7)
  cause: undecided: an operation outside of its domain (sqrt or log of 0, division by 0), an overflow, data that \
holds NaN, or diverging weights
  fix: check the batch of that step, and run it under torch.autograd.detect_anomaly() to see the operation

Telemetry:
  step  loss    grad norm  update   lr    opt steps  scale
  0     1.472   2.288      0.1144   0.05  1          2
  1     3.62    -          -        0.05  0          1
  2     5.973   6.682      0.3341   0.05  1          1
  3     2.017   -          -        0.05  0          0.5
  4     0.8576  1.681      0.08403  0.05  1          0.5
  5     1.834   -          -        0.05  0          0.25
  6     0.7167  1.365      0.06825  0.05  1          0.25
  7     2.392   -          -        0.05  0          0.125""",
}
