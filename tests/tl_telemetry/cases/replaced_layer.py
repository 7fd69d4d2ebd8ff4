"""A layer that is replaced after the optimizer was built, and replacements that the optimizer follows."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[replaced-layer] head.* (2 tensors) are in no optimizer (shapes (1, 8), (1,)); the optimizer holds 2 tensors instead \
that are no parameters of the model (the same shapes) (in use since step 2 of this run)
  cause: model.head was replaced after the optimizer was built, which still holds the old one
  fix: build the optimizer after the last change to the model, or add the new parameters with add_param_group()"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x).tanh())


def make_setup():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def twins(follow):
    """Take a new head in the third step."""

    def step(setup, batch):
        if setup.step_index == 2:
            setup.model.head = nn.Linear(8, 1)
            if follow:
                setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.05)
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def buggy():
    return twins(follow=False)


def healthy():
    return twins(follow=True)


def near_misses():
    def add(setup, batch):
        """Add the new head to the optimizer, which keeps the old one too."""
        if setup.step_index == 2:
            setup.model.head = nn.Linear(8, 1)
            setup.optimizer.add_param_group({"params": list(setup.model.head.parameters())})
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"added to the optimizer": {"make_setup": make_setup, "data": data, "step": add, "steps": 6}}
