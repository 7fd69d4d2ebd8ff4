"""Losses that no scale multiplies, although the scaler divides their gradients."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, penalty_of, update


def _single(backward):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        backward(setup.scaler, loss)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def never(scaler, loss):
    loss.backward()


def dropped(scaler, loss):
    scaler.scale(loss)
    loss.backward()


def scaled(scaler, loss):
    scaler.scale(loss).backward()


def _summed(total):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        total(setup.scaler, loss, penalty_of(setup)).backward()
        update(setup)
        return loss.detach()

    return step


def _two_passes(scale, every=1):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if setup.step_index % every == 0:
            scale(setup.scaler, penalty_of(setup)).backward()
        update(setup)
        return loss.detach()

    return step


def _micro_batches(scale):
    def step(setup, batch):
        loss = loss_of(setup, batch) / 2
        if setup.step_index % 2 == 0:
            scale(setup.scaler, loss).backward()
            return loss.detach()
        setup.scaler.scale(loss).backward()
        update(setup)
        setup.optimizer.zero_grad()
        return loss.detach()

    return step


def buggy():
    return {
        "a pass now and then": case(_two_passes(lambda scaler, penalty: penalty, every=3)),
        "never, which raises": case(_single(never)),
        "the result is dropped": case(_single(dropped)),
        "one term of a sum": case(_summed(lambda scaler, loss, penalty: scaler.scale(loss) + penalty)),
        "one of two passes": case(_two_passes(lambda scaler, penalty: penalty)),
        "all but the last micro-batch": case(_micro_batches(lambda scaler, loss: loss)),
    }


def healthy():
    both = _two_passes(lambda scaler, penalty: scaler.scale(penalty))
    return {
        "a pass now and then": case(_two_passes(lambda scaler, penalty: scaler.scale(penalty), every=3)),
        "never, which raises": case(_single(scaled)),
        "the result is dropped": case(_single(scaled)),
        "one term of a sum": case(_summed(lambda scaler, loss, penalty: scaler.scale(loss + penalty))),
        "one of two passes": case(both),
        "all but the last micro-batch": case(_micro_batches(lambda scaler, loss: scaler.scale(loss))),
    }


def near_misses():
    def by_its_number(scaler, loss):
        scaler.scale(loss.detach())
        (loss * scaler.get_scale()).backward()

    def by_the_gradient(scaler, loss):
        scaler.scale(loss.detach())
        loss.backward(gradient=torch.tensor(scaler.get_scale()))

    return {
        "each term scaled": case(
            _summed(lambda scaler, loss, penalty: scaler.scale(loss) + scaler.scale(penalty)),
        ),
        "divided after it was scaled": case(_single(lambda scaler, loss: (scaler.scale(loss) / 2).backward())),
        "multiplied by the number": case(_single(by_its_number)),
        "by the gradient that it begins with": case(_single(by_the_gradient)),
        "a term that is multiplied by 0": case(
            _summed(lambda scaler, loss, penalty: scaler.scale(loss) + 0.0 * penalty),
        ),
    }


MESSAGES = {
    "a pass now and then": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] backward() at loss_not_scaled.py:51 ran on a loss that no scale multiplies, and backward() at \
loss_not_scaled.py:49 on a scaled one: the GradScaler divided the gradients of both by 256 ('optimizer', 2 of 4 \
updates, steps 0, 3)
  cause: one of several losses is not scaled: its part of the gradients becomes 256 times too small, and the other \
losses decide alone
  fix: write scaler.scale(loss).backward() at loss_not_scaled.py:51 too

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     3.62   3.952      0.1976  0.05  1          256
  2     4.979  5.949      0.2975  0.05  1          256
  3     1.874  2.645      0.1323  0.05  1          256""",
    "never, which raises": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] scaler.scale() had not been called on any loss: the GradScaler raised at loss_not_scaled.py:14 in \
step 0 (Attempted step but _scale is None)
  cause: scaler.scale() is missing: the loss was never multiplied by the scale (backward at loss_not_scaled.py:22), \
and the scaler has none yet
  fix: write scaler.scale(loss).backward() at loss_not_scaled.py:22

Telemetry:
  step  lr    opt steps
  0     0.05  0""",
    "the result is dropped": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] backward() at loss_not_scaled.py:27 ran on a loss that no scale multiplies, and the GradScaler \
divided the gradients of 'optimizer' by 256 all the same (4 of 4 updates, steps 0-3)
  cause: scaler.scale() ran, and its result was not used for this backward pass, as in `scaler.scale(loss); \
loss.backward()`: the gradients become 256 times too small
  fix: write scaler.scale(loss).backward() at loss_not_scaled.py:27

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.008939   0.0004469  0.05  1          256
  1     3.912  0.01648    0.000824   0.05  1          256
  2     6.595  0.02756    0.001378   0.05  1          256
  3     2.649  0.01091    0.0005456  0.05  1          256""",
    "one term of a sum": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] the sum of losses that backward() at loss_not_scaled.py:38 ran on has terms that no scale \
multiplies (made by Sum), beside scaled ones: the GradScaler divided the gradients of both by 256 ('optimizer', 4 \
of 4 updates, steps 0-3)
  cause: one of several losses is not scaled: its part of the gradients becomes 256 times too small, and the other \
losses decide alone
  fix: scale the whole sum at loss_not_scaled.py:38: scaler.scale(first + second).backward()

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     3.62   3.952      0.1976  0.05  1          256
  2     4.979  5.949      0.2975  0.05  1          256
  3     1.874  2.645      0.1323  0.05  1          256""",
    "one of two passes": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] backward() at loss_not_scaled.py:51 ran on a loss that no scale multiplies, and backward() at \
loss_not_scaled.py:49 on a scaled one: the GradScaler divided the gradients of both by 256 ('optimizer', 4 of 4 \
updates, steps 0-3)
  cause: one of several losses is not scaled: its part of the gradients becomes 256 times too small, and the other \
losses decide alone
  fix: write scaler.scale(loss).backward() at loss_not_scaled.py:51 too

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     3.62   3.952      0.1976  0.05  1          256
  2     4.979  5.949      0.2975  0.05  1          256
  3     1.874  2.645      0.1323  0.05  1          256""",
    "all but the last micro-batch": """\
Mixed precision training: failed, 1 finding

[loss-not-scaled] backward() at loss_not_scaled.py:62 ran on a loss that no scale multiplies, and backward() at \
loss_not_scaled.py:64 on a scaled one: the GradScaler divided the gradients of both by 256 ('optimizer', 2 of 2 \
updates, steps 1, 3)
  cause: one of several losses is not scaled: its part of the gradients becomes 256 times too small, and the other \
losses decide alone
  fix: write scaler.scale(loss).backward() at loss_not_scaled.py:62 too

Telemetry:
  step  loss    grad norm  update   lr    opt steps  scale
  0     0.7359  -          -        0.05  0          -
  1     1.958   2.114      0.1057   0.05  1          256
  2     3.008   -          -        0.05  0          256
  3     1.257   1.357      0.06783  0.05  1          256""",
}
