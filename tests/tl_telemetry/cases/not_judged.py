"""A run in which gradients come from nowhere that can be seen."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[not-judged] no backward pass was seen, but gradients were there (torch.autograd.grad, torch.func, or a backend of \
its own): where gradients come from could not be judged"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def twins(by_grad):
    def step(setup, batch):
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        if by_grad:
            setup.model.weight.grad, setup.model.bias.grad = torch.autograd.grad(loss, list(setup.model.parameters()))
        else:
            setup.optimizer.zero_grad()
            loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 4}


def buggy():
    return twins(by_grad=True)


def healthy():
    return twins(by_grad=False)
