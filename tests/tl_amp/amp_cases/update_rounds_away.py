"""Weights in low precision whose updates are too small for it."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of

from tl_core import TrainingSetup


def _setup(dtype, lr):
    def make_setup():
        model = Net().to(dtype)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))

    return make_setup


def step(setup, batch):
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0].to(setup.model.body.weight.dtype)).float() - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def mixed(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def buggy():
    return {"a model in bfloat16": case(step, _setup(torch.bfloat16, 1e-5), steps=6)}


def healthy():
    return {"a model in bfloat16": case(mixed, _setup(torch.float32, 1e-5), steps=6)}


class Masters(torch.optim.Optimizer):
    """Keeps weights in float32, and writes them to those in low precision."""

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), {"lr": lr})
        self.copies = [parameter.detach().float() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, copy in zip(self.param_groups[0]["params"], self.copies, strict=True):
            parameter.copy_(copy.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"]))


def near_misses():
    def make_masters():
        model = Net().to(torch.bfloat16)
        return TrainingSetup(model, Masters(model.parameters(), 1e-4))

    return {
        "updates that are large enough": case(step, _setup(torch.bfloat16, 0.1), steps=6),
        "weights of its own in float32": case(step, make_masters, steps=6),
    }


MESSAGES = {
    "a model in bfloat16": """\
Mixed precision training: failed, 1 finding

[update-rounds-away] 100 % of the elements of all 4 parameters that had a gradient did not change when 'optimizer' \
stepped (4 updates looked at, steps 0-3): the updates round to nothing in bfloat16
  cause: bfloat16 represents a weight in steps of 2^-8 to 2^-7 (0.4 to 0.8 %) of its size; an update below half of \
that is lost, and with a learning rate of 1e-05 nearly all of them are
  fix: keep the weights in float32 and compute in low precision under torch.autocast, or raise the learning rate

Telemetry:
  step  loss   grad norm  update     lr     opt steps
  0     1.472  2.288      0          1e-05  1
  1     3.916  4.221      0          1e-05  1
  2     6.604  7.071      1.526e-05  1e-05  1
  3     2.652  2.796      0          1e-05  1
  4     1.552  2.453      0          1e-05  1
  5     2.325  2.529      0          1e-05  1""",
}
