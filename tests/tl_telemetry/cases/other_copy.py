"""An optimizer built for another copy of the model, and copies that are rightly there."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[other-copy] the optimizer holds none of the model's 4 trainable parameters, but 4 other tensors, of which 4 have the \
shape of a missing parameter; in no optimizer: 0.* (2 tensors), 2.* (2 tensors)
  cause: the optimizer was built for another copy of the model (before a deepcopy, or before the model was built or \
loaded again)
  fix: build the optimizer from the parameters of the model that is trained, after its last copy"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def twins(copied):
    def make_setup():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if copied:
            model = copy.deepcopy(model)
        return model, optimizer

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": 5}


def buggy():
    return twins(copied=True)


def healthy():
    return twins(copied=False)


def make_average():
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={"average": average})


def averaged(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_fn(setup.model, batch)
    loss.backward()
    setup.optimizer.step()
    setup.state["average"].update_parameters(setup.model)
    return loss


def rebuilt_with_model(setup, batch):
    """Start anew in the middle: another copy of the model, and an optimizer for it."""
    if setup.step_index == 3:
        setup.model = copy.deepcopy(setup.model)
        setup.optimizers["optimizer"] = torch.optim.SGD(setup.model.parameters(), lr=0.05)
    setup.optimizer.zero_grad()
    loss = loss_fn(setup.model, batch)
    loss.backward()
    setup.optimizer.step()
    return loss


def near_misses():
    rest = {"data": data, "steps": 6}
    return {
        "weights averaged in a copy": {"make_setup": make_average, "step": averaged, **rest},
        "model and optimizer copied": {
            "make_setup": lambda: (lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.05)))(net()),
            "step": rebuilt_with_model,
            **rest,
        },
    }
