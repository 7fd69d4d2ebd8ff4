"""Gradients that are clipped while they are still multiplied by the scale."""

from __future__ import annotations

import torch
from amp_loops import case, clip_by_hand, loss_of, one, two, update
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm


def _step(clip, *, unscale):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for name in unscale:
            setup.scaler.unscale_(setup.optimizers[name])
        clip(list(setup.model.parameters()))
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def by_attribute(parameters):
    nn.utils.clip_grad_norm_(parameters, 1.0)


def by_name(parameters):
    clip_grad_norm_(parameters, 1.0)


def by_new_functions(parameters):
    clip_grads_with_norm_(parameters, 1.0, get_total_norm([parameter.grad for parameter in parameters]))


def by_value(parameters):
    clip_grad_value_(parameters, 0.5)


def by_hand(parameters):
    clip_by_hand(parameters, 1.0)


def by_hand_with_numbers(parameters):
    norm = float(torch.stack([parameter.grad.norm() for parameter in parameters]).norm())
    for parameter in parameters:
        parameter.grad.data.mul_(min(1.0, 1.0 / norm))


def each_by_hand(parameters):
    for parameter in parameters:
        norm = parameter.grad.norm()
        if norm > 0.5:
            parameter.grad.mul_(0.5 / norm)


def elements_by_hand(parameters):
    for parameter in parameters:
        parameter.grad.clamp_(-0.5, 0.5)


CLIPS = {
    "clip_grad_norm_ by attribute": by_attribute,
    "clip_grad_norm_ by name": by_name,
    "new functions": by_new_functions,
    "clip_grad_value_": by_value,
    "by hand": by_hand,
    "by hand, with numbers": by_hand_with_numbers,
    "each by hand": each_by_hand,
    "elements by hand": elements_by_hand,
}


def _micro_batches(*, unscale):
    def step(setup, batch):
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss / 2).backward()
        if setup.step_index % 2:
            if unscale:
                setup.scaler.unscale_(setup.optimizer)
            by_name(setup.model.parameters())
            update(setup)
            setup.optimizer.zero_grad()
        return loss.detach()

    return step


def _by_hand(bound, *, early):
    """Clip before a loss scale is undone by hand, or after it."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        (1024.0 * loss).backward()
        if early:
            clip_grad_norm_(setup.model.parameters(), bound)
        for parameter in setup.model.parameters():
            parameter.grad.div_(1024.0)
        if not early:
            clip_grad_norm_(setup.model.parameters(), bound)
        setup.optimizer.step()
        return loss.detach()

    return case(step, one(scale=None))


def _hooked(*, early):
    """Clip in a hook that a fused optimizer calls before its step, or after unscale_()."""

    def make_setup():
        setup = one(torch.optim.AdamW, fused=True, lr=0.01)()
        if early:
            setup.optimizer.register_step_pre_hook(lambda *_: by_name(list(setup.model.parameters())))
        return setup

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if not early:
            setup.scaler.unscale_(setup.optimizer)
            by_name(setup.model.parameters())
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return case(step, make_setup)


def buggy():
    return {name: case(_step(clip, unscale=()), steps=3) for name, clip in CLIPS.items()} | {
        "of both, with one unscaled": case(_step(by_name, unscale=("body",)), two()),
        "in a step hook of a fused optimizer": _hooked(early=True),
        "of accumulated gradients": case(_micro_batches(unscale=False)),
        "of a scale by hand": _by_hand(1.0, early=True),
    }


NOTED = dict.fromkeys(("of a scale by hand", "a bound that is multiplied by a scale by hand"), ("static-scale",))


def healthy():
    return {name: case(_step(clip, unscale=("optimizer",))) for name, clip in CLIPS.items()} | {
        "of both, with one unscaled": case(_step(by_name, unscale=("body", "head")), two()),
        "in a step hook of a fused optimizer": _hooked(early=False),
        "of accumulated gradients": case(_micro_batches(unscale=True)),
        "of a scale by hand": _by_hand(1.0, early=False),
    }


def near_misses():
    def times_the_scale(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        clip_grad_norm_(setup.model.parameters(), 0.5 * setup.scaler.get_scale())
        update(setup)
        return loss.detach()

    def by_a_count(parameters):
        for parameter in parameters:
            parameter.grad.div_(12.0)

    def measured(parameters):
        clip_grad_norm_(parameters, float("inf"))

    return {
        "a bound that is multiplied by the scale": case(times_the_scale),
        "a bound that is multiplied by a scale by hand": _by_hand(0.5 * 1024.0, early=True),
        "a bound that measures only": case(_step(measured, unscale=())),
        "a division by one number": case(_step(by_a_count, unscale=())),
    }


# The three calls that clip the norm have the same effect.
NORM = """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] {function}() at clip_before_unscale.py:{line} ran before unscale_ in 3 calls (steps 0-2), on \
gradients that are still 256 times too large: a norm of up to 1.81e+03 against a bound of 1, reached in 3 of them
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00391
  fix: call scaler.unscale_(optimizer) before {function}() at clip_before_unscale.py:{line}, once an update

Telemetry:
  step  loss   grad norm         update     lr    opt steps  scale
  0     1.472  2.288 → 0.003906  0.0001953  0.05  1          256
  1     3.916  4.224 → 0.003906  0.0001953  0.05  1          256
  2     6.596  7.057 → 0.003906  0.0001953  0.05  1          256"""

BY_HAND = """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] before unscale_, the total norm of the gradients of 'optimizer' was brought to 1 in 3 of 3 \
updates (steps 0-2), from 586 to 1.81e+03: they are clipped or normalised by hand while they are still 256 times \
too large
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00391
  fix: call scaler.unscale_(optimizer) before the gradients are clipped, once an update

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.003906   0.0001953  0.05  1          256
  1     3.916  0.003906   0.0001953  0.05  1          256
  2     6.596  0.003906   0.0001953  0.05  1          256"""

MESSAGES = {
    "clip_grad_norm_ by attribute": NORM.format(function="clip_grad_norm_", line=28),
    "clip_grad_norm_ by name": NORM.format(function="clip_grad_norm_", line=32),
    "new functions": NORM.format(function="clip_grads_with_norm_", line=36),
    "clip_grad_value_": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] clip_grad_value_() at clip_before_unscale.py:40 ran before unscale_ in 3 calls (steps 0-2), \
on gradients that are still 256 times too large: a norm of up to 1.8e+03 against a bound of 0.5, reached in 3 of \
them
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00195
  fix: call scaler.unscale_(optimizer) before clip_grad_value_() at clip_before_unscale.py:40, once an update

Telemetry:
  step  loss   grad norm        update     lr    opt steps  scale
  0     1.472  2.288 → 0.01755  0.0008775  0.05  1          256
  1     3.912  4.219 → 0.01758  0.0008789  0.05  1          256
  2     6.59   7.047 → 0.01758  0.0008789  0.05  1          256""",
    "by hand": BY_HAND,
    "by hand, with numbers": BY_HAND,
    "each by hand": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] before unscale_, the norm of each gradient of 'optimizer' was brought to 0.5 in 3 of 3 \
updates (steps 0-2), from 54.7 to 1.45e+03: they are clipped or normalised by hand while they are still 256 times \
too large
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00195
  fix: call scaler.unscale_(optimizer) before the gradients are clipped, once an update

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.003906   0.0001953  0.05  1          256
  1     3.914  0.003906   0.0001953  0.05  1          256
  2     6.595  0.003906   0.0001953  0.05  1          256""",
    "elements by hand": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] before unscale_, the largest element of each gradient of 'optimizer' was brought to 0.5 in 3 \
of 3 updates (steps 0-2), from 17.3 to 498: they are clipped or normalised by hand while they are still 256 times \
too large
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00195
  fix: call scaler.unscale_(optimizer) before the gradients are clipped, once an update

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.01755    0.0008775  0.05  1          256
  1     3.912  0.01758    0.0008789  0.05  1          256
  2     6.59   0.01758    0.0008789  0.05  1          256""",
    "of both, with one unscaled": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] clip_grad_norm_() at clip_before_unscale.py:32 ran before unscale_ in 4 calls (steps 0-3), on \
gradients of head.* (2 tensors) that are still 256 times too large: a norm of up to 1.54e+03 against a bound of 1, \
reached in 4 of them
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00391
  fix: call scaler.unscale_(optimizer) for 'head' before clip_grad_norm_() at clip_before_unscale.py:32, once an \
update

Telemetry:
  step  loss   grad norm body       update body  lr body  opt steps body  grad norm head    update head  lr head  \
opt steps head  scale
  0     1.472  0.004181 → 0.002067  0.0001034    0.05     1               2.023 → 0.003906  0.0001953    0.05     1 \
              256
  1     3.916  0.00961 → 0.002799   0.0001399    0.05     1               3.434 → 0.003906  0.0001953    0.05     1 \
              256
  2     6.596  0.01449 → 0.002414   0.0001207    0.05     1               6.003 → 0.003906  0.0001953    0.05     1 \
              256
  3     2.652  0.007855 → 0.004055  0.0002028    0.05     1               1.937 → 0.003906  0.0001953    0.05     1 \
              256""",
    "in a step hook of a fused optimizer": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] clip_grad_norm_() at clip_before_unscale.py:32 ran before unscale_ in 4 calls (steps 0-3), on \
gradients that are still 256 times too large: a norm of up to 1.65e+03 against a bound of 1, reached in 4 of them
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00391
  fix: call scaler.unscale_(optimizer) before clip_grad_norm_() at clip_before_unscale.py:32, once an update

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.472  2.288      0.09004  0.01  1          256
  1     3.746  4.054      0.07709  0.01  1          256
  2     5.914  6.43       0.07409  0.01  1          256
  3     2.415  2.657      0.06781  0.01  1          256""",
    "of accumulated gradients": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] clip_grad_norm_() at clip_before_unscale.py:32 ran before unscale_ in 2 calls (steps 1, 3), \
on gradients that are still 256 times too large: a norm of up to 1.16e+03 against a bound of 1, reached in 2 of them
  cause: clipping comes before scaler.unscale_(): the bound that the gradients themselves are held to is bound / \
scale, 0.00391
  fix: call scaler.unscale_(optimizer) before clip_grad_norm_() at clip_before_unscale.py:32, once an update

Telemetry:
  step  loss   grad norm         update     lr    opt steps  scale
  0     1.472  -                 -          0.05  0          256
  1     3.916  2.971 → 0.003906  0.0001953  0.05  1          256
  2     6.595  -                 -          0.05  0          256
  3     2.651  4.521 → 0.003906  0.0001953  0.05  1          256""",
    "of a scale by hand": """\
Mixed precision training: failed, 1 finding

[clip-before-unscale] clip_grad_norm_() at clip_before_unscale.py:100 brought the gradients from a norm of up to \
7.23e+03 to its bound of 1, and they were divided by the loss scale of 1024 by hand only after it (4 updates, steps \
0-3)
  cause: clipping comes before the loss scale is undone: the bound that the gradients themselves are held to is \
bound / scale, 0.000977
  fix: divide the gradients by the loss scale before clip_grad_norm_() at clip_before_unscale.py:100

Notes:
[static-scale] the loss that backward() at clip_before_unscale.py:98 ran on is multiplied by 1024, and the \
gradients were edited by hand before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit

Telemetry:
  step  loss   grad norm         update     lr    opt steps
  0     1.472  2343 → 0.0009766  4.883e-05  0.05  1
  1     3.914  4323 → 0.0009766  4.883e-05  0.05  1
  2     6.6    7228 → 0.0009766  4.883e-05  0.05  1
  3     2.651  2861 → 0.0009766  4.883e-05  0.05  1""",
}
