"""Gradients that are others with another loss scale."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain, update


def _hooked(bound):
    """Clamp gradients in hooks of the weights; a bound of None leaves them out."""

    def make_setup():
        setup = one()()
        if bound is not None:
            for parameter in setup.model.parameters():
                parameter.register_hook(lambda grad: grad.clamp(-bound, bound))
        return setup

    return make_setup


def _penalised(slope_of, weight=1e-3):
    """Add a penalty on the slope of the outputs over the inputs."""

    def step(setup, batch):
        inputs = batch[0].clone().requires_grad_()
        setup.optimizer.zero_grad()
        outputs = setup.model(inputs)
        slope = slope_of(setup, torch.autograd.grad(setup.scaler.scale(outputs.sum()), inputs, create_graph=True)[0])
        loss = (outputs - batch[1]).square().mean() + weight * (slope.norm(dim=1) - 1.0).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def _clamped(*, early):
    """Clamp elements where the gradients are still scaled, or after unscale_()."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if not early:
            setup.scaler.unscale_(setup.optimizer)
        for parameter in setup.model.parameters():
            parameter.grad.data = torch.tanh(parameter.grad.data)
        update(setup)
        return loss.detach()

    return step


def as_it_is(setup, slope):
    return slope


def divided(setup, slope):
    return slope / setup.scaler.get_scale()


def _of_outputs(*, scaled):
    """Scale what the loss is computed of, and not the loss."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        outputs = setup.model(batch[0])
        if scaled:
            loss = (setup.scaler.scale(outputs) - batch[1]).square().mean()
            loss.backward()
        else:
            loss = (outputs - batch[1]).square().mean()
            setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def buggy():
    return {
        "outputs that are scaled": case(_of_outputs(scaled=True), one(lr=1e-6), steps=3),
        "a clamp in hooks": case(plain, _hooked(1.0), steps=3),
        "a gradient penalty": case(_penalised(as_it_is), steps=3),
        "squashed by hand": case(_clamped(early=True), steps=3),
    }


def healthy():
    return {
        "outputs that are scaled": case(_of_outputs(scaled=False), one(lr=1e-6), steps=3),
        "a clamp in hooks": case(plain, _hooked(None), steps=3),
        "a gradient penalty": case(_penalised(divided), steps=3),
        "squashed by hand": case(_clamped(early=False), steps=3),
    }


def near_misses():
    def make_doubled():
        setup = one()()
        for parameter in setup.model.head.parameters():
            parameter.register_hook(lambda grad: 2.0 * grad)
        return setup

    def small(setup, batch):
        """Have gradients that float16 keeps only because they are scaled."""
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = setup.model(batch[0])
        loss = 1e-6 * (outputs.float() - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return {
        "a factor in hooks": case(plain, make_doubled, steps=3),
        "a bound that is never reached": case(plain, _hooked(1e6), steps=3),
        "gradients that need the scale": case(small, one(scale=2.0**10), steps=3),
    }


MESSAGES = {
    "outputs that are scaled": """\
Mixed precision training: failed, 1 finding

[depends-on-scale] the gradients of the first update, in step 0, depend on the loss scale: body.* (2 tensors), \
head.* (2 tensors) (head.bias has a norm of 216 at the scale of 256, and of 53.7 at a quarter of it)
  cause: undecided, but within the backward pass, since nothing changed the gradients after it: a term of the loss \
is made of gradients that torch.autograd.grad() takes of a scaled loss, scaler.scale() takes something that the \
loss is computed of (outputs) instead of the loss, or hooks inside of the model act on gradients that are still \
multiplied by the scale
  fix: scale the loss itself; divide gradients of a scaled loss by scaler.get_scale() before they go into a loss; \
multiply bounds in hooks by it

Telemetry:
  step  loss       grad norm  update     lr     opt steps  scale
  0     1.61e+04   291.1      0.000291   1e-06  1          256
  1     1.762e+04  303.3      0.0003033  1e-06  1          256
  2     1.296e+04  326        0.000326   1e-06  1          256""",
    "a clamp in hooks": """\
Mixed precision training: failed, 1 finding

[depends-on-scale] the gradients of the first update, in step 0, depend on the loss scale: body.* (2 tensors), \
head.* (2 tensors) (body.weight has a norm of 0.0301 at the scale of 256, and of 0.116 at a quarter of it)
  cause: gradient hooks (register_hook) on body.* (2 tensors), head.* (2 tensors) run in the backward pass, on \
gradients that are still multiplied by the scale: a bound or a threshold in them means something else at each scale
  fix: do what they do after scaler.unscale_(optimizer), or multiply their bounds by scaler.get_scale()

Telemetry:
  step  loss   grad norm  update    lr    opt steps  scale
  0     1.472  0.03498    0.001749  0.05  1          256
  1     3.909  0.03499    0.00175   0.05  1          256
  2     6.589  0.03495    0.001748  0.05  1          256""",
    "a gradient penalty": """\
Mixed precision training: failed, 1 finding

[depends-on-scale] the gradients of the first update, in step 0, depend on the loss scale: body.* (2 tensors), \
head.weight (head.weight has a norm of 29.9 at the scale of 256, and of 2.75 at a quarter of it)
  cause: undecided, but within the backward pass, since nothing changed the gradients after it: a term of the loss \
is made of gradients that torch.autograd.grad() takes of a scaled loss, scaler.scale() takes something that the \
loss is computed of (outputs) instead of the loss, or hooks inside of the model act on gradients that are still \
multiplied by the scale
  fix: scale the loss itself; divide gradients of a scaled loss by scaler.get_scale() before they go into a loss; \
multiply bounds in hooks by it

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     8.305  36.66      1.833   0.05  1          256
  1     31.53  101.3      5.065   0.05  1          256
  2     107.6  341.9      17.1    0.05  1          256""",
    "squashed by hand": """\
Mixed precision training: failed, 1 finding

[depends-on-scale] the gradients of the first update, in step 0, depend on the loss scale: body.* (2 tensors), \
head.* (2 tensors) (body.weight has a norm of 0.0298 at the scale of 256, and of 0.114 at a quarter of it)
  cause: the gradients are changed between backward() at depends_on_scale.py:44 and unscaling: they are still \
multiplied by the scale there, and a bound, a threshold or noise means something else at each scale
  fix: call scaler.unscale_(optimizer) before they are changed, once an update

Telemetry:
  step  loss   grad norm  update    lr    opt steps  scale
  0     1.472  0.03476    0.001738  0.05  1          256
  1     3.909  0.0349     0.001745  0.05  1          256
  2     6.589  0.03488    0.001744  0.05  1          256""",
}
