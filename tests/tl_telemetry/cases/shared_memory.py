"""Two Parameters in one piece of memory, and weights that are tied as they should be."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[shared-memory] encoder.weight and decoder.weight are two Parameters that share memory (all of it); both are in an \
optimizer, which updates this memory once for each, with a part of the gradient each time
  cause: sharing memory (through .data or a view) does not tie weights: each Parameter has a gradient of its own
  fix: tie them by assigning the Parameter itself, model.decoder.weight = model.encoder.weight, before the optimizer \
is built; if they are not meant to be tied, give each its own memory with .clone()"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        tie(self)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x).tanh()))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def loop(tie):
    def make_setup():
        model = Net(tie)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": 5}


def through_data(net):
    net.decoder.weight.data = net.encoder.weight.data


def by_parameter(net):
    net.decoder.weight = net.encoder.weight


def equal_at_first(net):
    net.decoder.weight.data.copy_(net.encoder.weight.data)


def views_of_one(net):
    """Give both a half of one piece of memory, as flattened optimizers do."""
    memory = torch.cat([net.encoder.weight.data.flatten(), net.decoder.weight.data.flatten()])
    net.encoder.weight.data = memory[:16].view(4, 4)
    net.decoder.weight.data = memory[16:].view(4, 4)


def buggy():
    return loop(through_data)


def healthy():
    return loop(by_parameter)


def near_misses():
    return {"equal at first": loop(equal_at_first), "halves of one memory": loop(views_of_one)}
