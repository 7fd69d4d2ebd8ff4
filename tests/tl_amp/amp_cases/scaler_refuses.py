"""Other uses that a GradScaler refuses."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, one, scaler_of, two, update

from tl_core import TrainingSetup


def make_half():
    model = Net().half()
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler_of())


def _low(setup, batch):
    setup.optimizer.zero_grad()
    dtype = setup.model.body.weight.dtype
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = setup.model(batch[0].to(dtype))
    loss = (outputs.float() - batch[1]).square().mean()
    setup.scaler.scale(loss).backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


def _reached(names):
    """Train the body alone, and step some optimizers."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = setup.model.body(batch[0]).square().mean()
        setup.scaler.scale(loss).backward()
        for name in names:
            setup.scaler.step(setup.optimizers[name])
        setup.scaler.update()
        return loss.detach()

    return step


def _closure(*, through):
    def step(setup, batch):
        def closure():
            setup.optimizer.zero_grad()
            loss = loss_of(setup, batch)
            if through:
                loss = setup.scaler.scale(loss)
            loss.backward()
            return loss.detach()

        if through:
            return setup.scaler.step(setup.optimizer, closure=closure)
        return setup.optimizer.step(closure)

    return step


def _unscaled(*, early):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = setup.scaler.scale(loss_of(setup, batch))
        if early:
            setup.scaler.unscale_(setup.optimizer)
        loss.backward()
        if not early:
            setup.scaler.unscale_(setup.optimizer)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "unscale_ before backward": case(_unscaled(early=True)),
        "float16 weights": case(_low, make_half),
        "a part without gradients": case(_reached(("body", "head")), two()),
        "a closure": case(_closure(through=True), one(torch.optim.LBFGS, lr=0.1)),
    }


def healthy():
    return {
        "unscale_ before backward": case(_unscaled(early=False)),
        "float16 weights": case(_low, one(lr=0.01)),
        "a part without gradients": case(_reached(("body", "head")), _both),
        "a closure": case(_closure(through=False), one(torch.optim.LBFGS, None, lr=0.1)),
    }


def _both():
    """Give the body's layer to two optimizers, its weight and its bias."""
    model = Net()
    parts = {"body": [model.body.weight], "head": [model.body.bias]}
    return TrainingSetup(
        model, {name: torch.optim.SGD(held, lr=0.05) for name, held in parts.items()}, scaler=scaler_of()
    )


def near_misses():
    def left_out(setup, batch):
        if setup.step_index == 2:
            return loss_of(setup, batch).detach()
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return {
        "a step without an update": case(left_out),
        "likewise, of two optimizers": case(left_out, two()),
    }


MESSAGES = {
    "unscale_ before backward": """\
Mixed precision training: failed, 1 finding

[scaler-refuses] all 4 parameters of 'optimizer' had no gradient when the scaler unscaled them: the GradScaler \
raised at scaler_refuses.py:69 in step 0 (No inf checks were recorded for this optimizer)
  cause: scaler.unscale_() came before backward() at scaler_refuses.py:66: it found no gradients, and a scaler \
looks at them once an update
  fix: call scaler.unscale_() after backward(), once an update

Telemetry:
  step  lr    opt steps  scale
  0     0.05  0          256""",
    "float16 weights": """\
Mixed precision training: failed, 1 finding

[scaler-refuses] all 4 parameters are float16: the GradScaler raised at scaler_refuses.py:23 in step 0 (Attempting \
to unscale FP16 gradients)
  cause: the weights themselves are float16 (model.half()), and so are their gradients: a scaler divides only \
float32 gradients, because what it scaled up would be lost again in float16
  fix: keep the weights in float32, and compute in float16 under torch.autocast

Telemetry:
  step  lr    opt steps  scale
  0     0.01  0          256""",
    "a part without gradients": """\
Mixed precision training: failed, 1 finding

[scaler-refuses] no backward pass had given a gradient to head.* (2 tensors) of 'head': the GradScaler raised at \
scaler_refuses.py:36 in step 0 (No inf checks were recorded for this optimizer)
  cause: none of its parameters had a gradient; the backward passes before it filled body.* (2 tensors)
  fix: call scaler.step() for 'head' only after a backward pass that reaches its parameters

Telemetry:
  step  grad norm body  update body  lr body  opt steps body  lr head  opt steps head  scale
  0     0.4174          0.02087      0.05     1               0.05     0               256""",
    "a closure": """\
Mixed precision training: failed, 1 finding

[scaler-refuses] the GradScaler raised at scaler_refuses.py:54 in step 0 (Closure use is not currently supported if \
GradScaler is enabled)
  cause: a closure runs backward() inside of the optimizer's step, after the scaler has looked at the gradients
  fix: use an optimizer without a closure, or train without a GradScaler (bfloat16 needs none)

Telemetry:
  step  lr   opt steps
  0     0.1  0""",
}
