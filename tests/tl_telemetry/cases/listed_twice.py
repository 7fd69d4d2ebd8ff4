"""Parameters that one optimizer lists twice, and tied weights that it lists once."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[listed-twice] the optimizer lists 1 parameter 2 times in group 0: encoder.weight
  cause: an optimizer updates a parameter once for every time that it is listed, so each step moves it several times
  fix: list every parameter once, in one group"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x).tanh()))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def loop(parameters_of):
    def make_setup():
        model = Tied()
        return model, torch.optim.SGD(parameters_of(model), lr=0.05)

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": 5}


def twins(all_names):
    """Collect the parameters by all of their names: a tied weight has two."""
    return loop(lambda model: [p for _, p in model.named_parameters(remove_duplicate=not all_names)])


def buggy():
    return twins(all_names=True)


def healthy():
    return twins(all_names=False)


def near_misses():
    def grouped(model):
        return [
            {"params": [*model.encoder.parameters()], "weight_decay": 0.1},
            {"params": [*model.head.parameters()]},
        ]

    return {"tied, in groups": loop(grouped), "all of them": loop(lambda model: model.parameters())}
