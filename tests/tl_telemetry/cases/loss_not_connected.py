"""A loss made anew from a number, and losses that reach the model by unusual ways."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[loss-not-connected] 6 backward passes (loss_not_connected.py:34) reached no parameter: the loss was a leaf tensor, \
with no graph behind it (steps 0-5)
  cause: the loss was made anew from a number or from detached data (`.item()`, `.detach()`, `torch.tensor(...)`); \
`requires_grad=True` on it only silences torch's error
  fix: call backward() on the tensor that the loss function returned, before any .item() or .detach()"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def twins(rewrap):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        if rewrap:
            loss = torch.tensor(loss.item(), requires_grad=True)
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def buggy():
    return twins(rewrap=True)


def healthy():
    return twins(rewrap=False)


def make_codes():
    """Train a decoder and codes of its own for the examples, as auto-decoders do."""
    model = nn.Linear(4, 1)
    codes = nn.Parameter(torch.zeros(8, 4))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [codes]}], lr=0.05)
    setup = TrainingSetup(model, optimizer)
    setup.codes = codes
    return setup


def decode(setup, batch):
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(setup.model(setup.codes), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


class Straight(torch.autograd.Function):
    """Round on the way forward, pass gradients straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def rounded(setup, batch):
    setup.optimizer.zero_grad()
    loss = (Straight.apply(setup.model(batch[0]) * 4) / 4 - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def from_gradient(setup, batch):
    """Start the backward pass at the output, from a gradient computed by hand."""
    setup.optimizer.zero_grad()
    output = setup.model(batch[0])
    with torch.no_grad():
        difference = output - batch[1]
    output.backward(gradient=2 * difference / difference.numel())
    setup.optimizer.step()
    return difference.square().mean()


def in_two_halves(setup, batch):
    """Cut the graph at the hidden layer and carry the gradient over by hand, as pipelines do."""
    first, last = setup.model[:2], setup.model[2:]
    setup.optimizer.zero_grad()
    hidden = first(batch[0])
    received = hidden.detach().requires_grad_()
    loss = nn.functional.mse_loss(last(received), batch[1])
    loss.backward()
    hidden.backward(received.grad)
    setup.optimizer.step()
    return loss


def several_roots(setup, batch):
    setup.optimizer.zero_grad()
    output = setup.model(batch[0])
    losses = [nn.functional.mse_loss(output, batch[1]), output.abs().mean()]
    torch.autograd.backward(losses)
    setup.optimizer.step()
    return losses[0]


def near_misses():
    def loop(step, make_setup=make_setup):
        return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}

    return {
        "codes beside the model": loop(decode, make_codes),
        "straight through": loop(rounded),
        "gradient by hand": loop(from_gradient),
        "in two halves": loop(in_two_halves),
        "several roots": loop(several_roots),
    }
