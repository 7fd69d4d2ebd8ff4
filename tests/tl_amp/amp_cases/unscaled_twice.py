"""Gradients that are divided by the scale twice for one update."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one
from torch.nn.utils import clip_grad_norm_


def _step(before=None, after=None, late=None):
    """Train, with something before and after unscale_(), and after the step."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if before is not None:
            before(setup)
        setup.scaler.unscale_(setup.optimizer)
        if after is not None:
            after(setup)
        clip_grad_norm_(setup.model.parameters(), 10.0)
        setup.scaler.step(setup.optimizer)
        if late is not None:
            late(setup)
        setup.scaler.update()
        return loss.detach()

    return step


def unscale(setup):
    setup.scaler.unscale_(setup.optimizer)


def divide(setup):
    for parameter in setup.model.parameters():
        parameter.grad.div_(setup.scaler.get_scale())


def measure(setup):
    torch.nn.utils.get_total_norm([parameter.grad for parameter in setup.model.parameters()])


def buggy():
    return {
        "for the log and for the clip": case(_step(after=unscale)),
        "after the step": case(_step(late=unscale)),
        "by hand before it": case(_step(before=divide)),
        "by hand after it": case(_step(after=divide), one(torch.optim.Adam)),
    }


def healthy():
    return {
        "for the log and for the clip": case(_step(after=measure)),
        "after the step": case(_step()),
        "by hand before it": case(_step()),
        "by hand after it": case(_step(), one(torch.optim.Adam)),
    }


def near_misses():
    def to_a_bound(setup):
        clip_grad_norm_(setup.model.parameters(), 0.01)

    def by_another_number(setup):
        for parameter in setup.model.parameters():
            parameter.grad.div_(12.0)

    def and_back(setup):
        divide(setup)
        for parameter in setup.model.parameters():
            parameter.grad.mul_(setup.scaler.get_scale())

    return {
        "a clip that makes them as small": case(_step(after=to_a_bound)),
        "divided by a count of tokens": case(_step(before=by_another_number)),
        "divided to look at them, and back": case(_step(before=and_back)),
    }


MESSAGES = {
    "for the log and for the clip": """\
Mixed precision training: failed, 1 finding

[unscaled-twice] unscale_() was called twice for optimizer 'optimizer' in step 0: at unscaled_twice.py:19 and at \
unscaled_twice.py:33: the GradScaler raised at unscaled_twice.py:33 in step 0 (unscale_() has already been called \
on this optimizer since the last update())
  cause: a scaler unscales an optimizer's gradients once an update: dividing them twice would make them too small
  fix: keep one of the two calls, that at unscaled_twice.py:19

Telemetry:
  step  lr    opt steps  scale
  0     0.05  0          256""",
    "after the step": """\
Mixed precision training: failed, 1 finding

[unscaled-twice] unscale_() was called for optimizer 'optimizer' at unscaled_twice.py:33 after scaler.step() at \
unscaled_twice.py:23: the GradScaler raised at unscaled_twice.py:33 in step 0 (unscale_() is being called after \
step())
  cause: scaler.step() unscales by itself; unscale_() must come before it
  fix: move unscale_() (and the clip after it) before scaler.step() at unscaled_twice.py:23

Telemetry:
  step  grad norm  update  lr    opt steps  scale
  0     2.288      0.1144  0.05  1          256""",
    "by hand before it": """\
Mixed precision training: failed, 1 finding

[unscaled-twice] the gradients of 'optimizer' became 256 times smaller between backward() and unscale_(), by no \
function of the scaler's, which divided them by 256 at unscaled_twice.py:19 as well (4 of 4 updates, steps 0-3)
  cause: the loop divides the gradients by the scale itself, and so does scaler.unscale_(): they become 256 times \
too small
  fix: leave the division to the scaler: scaler.unscale_(optimizer)

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.008939   0.0004469  0.05  1          256
  1     3.912  0.01648    0.000824   0.05  1          256
  2     6.595  0.02756    0.001378   0.05  1          256
  3     2.649  0.01091    0.0005456  0.05  1          256""",
    "by hand after it": """\
Mixed precision training: failed, 1 finding

[unscaled-twice] the gradients of 'optimizer' became 256 times smaller between unscale_() and step(), by no \
function of the scaler's, which divided them by 256 at unscaled_twice.py:19 as well (4 of 4 updates, steps 0-3)
  cause: the loop divides the gradients by the scale itself, and so does scaler.unscale_(): they become 256 times \
too small
  fix: leave the division to the scaler: scaler.unscale_(optimizer)

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  0.008939   0.45    0.05  1          256
  1     3.179  0.01366    0.3664  0.05  1          256
  2     3.734  0.01812    0.3521  0.05  1          256
  3     1.713  0.01068    0.3034  0.05  1          256""",
}
