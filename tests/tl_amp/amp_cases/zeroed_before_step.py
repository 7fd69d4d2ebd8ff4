"""Gradients that are zeroed between backward() and scaler.step()."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, two


def _step(*, early=True, between=None, unscale=False):
    def step(setup, batch):
        if early:
            setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if unscale:
            setup.scaler.unscale_(setup.optimizer)
        if between is not None:
            between(setup)
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def clear(setup):
    setup.optimizer.zero_grad()


def zero(setup):
    setup.optimizer.zero_grad(set_to_none=False)


def _between_steps(*, between):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizers["body"])
        if between:
            setup.model.zero_grad()
        setup.scaler.step(setup.optimizers["head"])
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    fused = one(torch.optim.AdamW, fused=True, lr=0.01)
    return {
        "set to 0": case(_step(between=zero)),
        "after unscale_": case(_step(between=clear, unscale=True)),
        "cleared, which raises": case(_step(between=clear)),
        "of a fused optimizer, which raises": case(_step(between=clear), fused),
        "between two steps, which raises": case(_between_steps(between=True), two()),
    }


def healthy():
    return {
        "set to 0": case(_step()),
        "after unscale_": case(_step(unscale=True)),
        "cleared, which raises": case(_step()),
        "of a fused optimizer, which raises": case(_step(), one(torch.optim.AdamW, fused=True, lr=0.01)),
        "between two steps, which raises": case(_between_steps(between=False), two()),
    }


def near_misses():
    def at_the_end(setup, batch):
        loss = _step(early=False)(setup, batch)
        setup.optimizer.zero_grad(set_to_none=False)
        return loss

    def of_the_other(setup, batch):
        body, head = setup.optimizers.values()
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        head.zero_grad()
        setup.scaler.step(body)
        setup.scaler.update()
        body.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        body.zero_grad()
        setup.scaler.step(head)
        setup.scaler.update()
        return loss.detach()

    return {"zeroed after the step": case(at_the_end), "of the other optimizer": case(of_the_other, two())}


MESSAGES = {
    "set to 0": """\
Mixed precision training: failed, 1 finding

[zeroed-before-step] the gradients of all 4 parameters were 0 in every element when 'optimizer' stepped, although a \
backward pass had filled them just before (4 of 4 updates, steps 0-3)
  cause: they were cleared between backward() and step(), as by a zero_grad() in the wrong place: the update has no \
gradient to apply, so that at most weight decay and momentum move the weights
  fix: move zero_grad() before backward(), or after step()

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  0          0       0.05  1          256
  1     3.916  0          0       0.05  1          256
  2     6.604  0          0       0.05  1          256
  3     2.652  0          0       0.05  1          256""",
    "after unscale_": """\
Mixed precision training: failed, 1 finding

[zeroed-before-step] the gradients of all 4 parameters were None when 'optimizer' stepped, although a backward pass \
had filled them just before (4 of 4 updates, steps 0-3)
  cause: they were cleared between backward() and step(), as by a zero_grad() in the wrong place: the update has no \
gradient to apply
  fix: move zero_grad() before backward(), or after step()

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  0          0       0.05  1          256
  1     3.916  0          0       0.05  1          256
  2     6.604  0          0       0.05  1          256
  3     2.652  0          0       0.05  1          256""",
    "cleared, which raises": """\
Mixed precision training: failed, 1 finding

[zeroed-before-step] the gradients of all 4 parameters, which backward() at zeroed_before_step.py:14 had filled in \
step 0, were None when 'optimizer' was to step: the GradScaler raised at zeroed_before_step.py:20 in step 0 (No inf \
checks were recorded for this optimizer)
  cause: zero_grad() came between backward() and scaler.step(): no gradient is left to unscale or to apply
  fix: move zero_grad() before backward(), or after scaler.step()

Telemetry:
  step  lr    opt steps  scale
  0     0.05  0          256""",
    "of a fused optimizer, which raises": """\
Mixed precision training: failed, 1 finding

[zeroed-before-step] the gradients of all 4 parameters, which a backward pass had filled, were None when \
scaler.step() ran at zeroed_before_step.py:20: the GradScaler raised at zeroed_before_step.py:21 in step 0 (No inf \
checks were recorded prior to update)
  cause: zero_grad() came between backward() and scaler.step(): no gradient is left to unscale or to apply
  fix: move zero_grad() before backward(), or after scaler.step()

Telemetry:
  step  grad norm  update  lr    opt steps  scale
  0     0          0       0.01  1          256""",
    "between two steps, which raises": """\
Mixed precision training: failed, 1 finding

[zeroed-before-step] the gradients of head.* (2 tensors), which backward() at zeroed_before_step.py:39 had filled \
in step 0, were None when 'head' was to step: the GradScaler raised at zeroed_before_step.py:43 in step 0 (No inf \
checks were recorded for this optimizer)
  cause: zero_grad() came between backward() and scaler.step(): no gradient is left to unscale or to apply
  fix: move zero_grad() before backward(), or after scaler.step()

Telemetry:
  step  grad norm body  update body  lr body  opt steps body  lr head  opt steps head  scale
  0     1.07            0.05352      0.05     1               0.05     0               256""",
}
