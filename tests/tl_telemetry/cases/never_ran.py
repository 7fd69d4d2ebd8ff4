"""A head that is never called, and modules whose gradients come without a call of theirs."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[never-ran] auxiliary.* (2 tensors) never got a gradient in 5 steps, and no forward pass of their module ran
  cause: undecided: its turn did not come in these steps (an expert that was not chosen, another task's head), or the \
loop does not use it
  fix: nothing, if its turn comes later; else call it in the forward pass, or remove it"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self, use_auxiliary):
        super().__init__()
        self.use_auxiliary = use_auxiliary
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        self.auxiliary = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.encoder(x).tanh()
        output = self.head(hidden)
        if self.use_auxiliary:
            output = output + 0.1 * self.auxiliary(hidden)
        return output


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def loop(make_model, steps=5):
    def make_setup():
        model = make_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": steps}


def buggy():
    return loop(lambda: Net(use_auxiliary=False))


def healthy():
    return loop(lambda: Net(use_auxiliary=True))


class Functional(Net):
    """Use a layer's weights without calling it."""

    def forward(self, x):
        return nn.functional.linear(
            self.encoder(x).tanh(), self.head.weight + self.auxiliary.weight, self.head.bias
        ) + (self.auxiliary.bias)


class Attentive(nn.Module):
    """Attention reads its output projection's weights without calling it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.attention(x[None])[0])


def near_misses():
    return {
        "weights used without a call": loop(lambda: Functional(True)),
        "attention": loop(Attentive),
        "compiled": loop(lambda: torch.compile(Net(True), backend="aot_eager")),
    }
