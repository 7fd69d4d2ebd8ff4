"""An optimizer built for another copy of the model, and copies that are rightly there."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from tl_core import TrainingSetup

MESSAGE = """\
[other-copy] the optimizer holds none of the model's 4 trainable parameters, but 4 other tensors, of which 4 have the \
shape of a missing parameter; in no optimizer: 0.* (2 tensors), 2.* (2 tensors); \
in this run gradients reached 4 of these, and nothing that the optimizer holds
  cause: the optimizer was built for another copy (before a deepcopy, before the model or the part was built again, \
or before load_state_dict(assign=True) put new Parameters in)
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


def make_called_with():
    """Train tensors that the model is called with in place of its own parameters."""
    model = net()
    used = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    setup = TrainingSetup(model, torch.optim.SGD(used.values(), lr=0.05))
    setup.used = used
    return setup


def called_with(setup, batch):
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(functional_call(setup.model, setup.used, (batch[0],)), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def make_ensemble():
    """Train the stacked parameters of three members at once."""
    members = nn.ModuleList(net() for _ in range(3))
    parameters, _ = stack_module_state(list(members))
    setup = TrainingSetup(members, torch.optim.SGD(parameters.values(), lr=0.05))
    setup.used, setup.base = parameters, copy.deepcopy(members[0]).to("meta")
    return setup


def ensemble(setup, batch):
    setup.optimizer.zero_grad()
    output = vmap(lambda parameters: functional_call(setup.base, parameters, (batch[0],)))(setup.used)
    loss = (output - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def near_misses():
    rest = {"data": data, "steps": 6}
    return {
        "called with other tensors": {"make_setup": make_called_with, "step": called_with, **rest},
        "stacked ensemble": {"make_setup": make_ensemble, "step": ensemble, **rest},
        "weights averaged in a copy": {"make_setup": make_average, "step": averaged, **rest},
        "model and optimizer copied": {
            "make_setup": lambda: (lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.05)))(net()),
            "step": rebuilt_with_model,
            **rest,
        },
    }
