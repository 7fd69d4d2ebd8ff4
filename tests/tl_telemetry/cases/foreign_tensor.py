"""An optimizer with tensors that are not the model's and get no gradient, and ones that train beside the model."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[foreign-tensor] the optimizer holds 1 tensor that is no parameter of the model (shape (8,)), while scale is in no \
optimizer; the tensor that it holds got no gradient in this run
  cause: undecided: what it holds is a copy of what is missing, or was a part of the model that has been replaced
  fix: build the optimizer from the finished model's own parameters"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x).tanh() * self.scale)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return nn.functional.mse_loss(output, target) * (-self.log_variance).exp() + self.log_variance


def twins(own):
    """Make the scale anew from its own values for the optimizer, or hand over the scale itself."""

    def make_setup():
        model = Net()
        scale = model.scale if own else nn.Parameter(model.scale.detach().clone())
        parameters = [scale, *model.encoder.parameters(), *model.head.parameters()]
        return model, torch.optim.SGD(parameters, lr=0.05)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": 5}


def buggy():
    return twins(own=False)


def healthy():
    return twins(own=True)


def make_criterion(in_state):
    model, criterion = Net(), Criterion()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05)
    setup = TrainingSetup(model, optimizer, state={"criterion": criterion} if in_state else None)
    setup.loss = criterion
    return setup


def with_criterion(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.loss(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def make_tensors():
    """Train plain tensors that belong to no module."""
    model = Net()
    codes = torch.zeros(8, 4, requires_grad=True)
    setup = TrainingSetup(model, torch.optim.SGD([{"params": [codes]}, {"params": model.parameters()}], lr=0.05))
    setup.codes = codes
    return setup


def with_codes(setup, batch):
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(setup.model(setup.codes + batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def near_misses():
    def loop(make_setup, step):
        return {"make_setup": make_setup, "data": data, "step": step, "steps": 5}

    return {
        "criterion": loop(lambda: make_criterion(False), with_criterion),
        "criterion in the state": loop(lambda: make_criterion(True), with_criterion),
        "codes": loop(make_tensors, with_codes),
    }
