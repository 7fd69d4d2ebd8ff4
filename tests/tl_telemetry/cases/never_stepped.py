"""An optimizer that never steps although its parameters get gradients, and ones that rightly wait."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[never-stepped] 'encoder' never stepped in 6 steps, although 6 backward passes gave gradients to encoder.* (2 \
tensors); nothing else moved them
  cause: undecided: step() is not called on this optimizer, the condition under which it is called is never true (`i \
% k == k`), or the run is shorter than one of its cycles
  fix: call step() on 'encoder'; if it is due only after more than 6 steps, run more"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()})


def loss_of(setup, batch):
    return nn.functional.mse_loss(setup.model["head"](setup.model["encoder"](batch[0]).tanh()), batch[1])


def twins(stepped):
    def step(setup, batch):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        for name in stepped:
            setup.optimizers[name].step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def buggy():
    return twins(stepped=["head"])


def healthy():
    return twins(stepped=["encoder", "head"])


def moved_by_hand(setup, batch):
    """Move the parameters of an optimizer by hand, which keeps only their learning rate."""
    loss = loss_of(setup, batch)
    loss.backward()
    for p in setup.model["encoder"].parameters():
        p.data -= setup.optimizers["encoder"].param_groups[0]["lr"] * p.grad
    setup.optimizers["head"].step()
    setup.model.zero_grad()
    return loss


def make_hand():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    return model, torch.optim.SGD(model["head"].parameters(), lr=0.05)


def by_hand_alone(setup, batch):
    """Move what is in no optimizer by hand."""
    loss = loss_of(setup, batch)
    loss.backward()
    for p in setup.model["encoder"].parameters():
        p.data -= 0.05 * p.grad
    setup.optimizer.step()
    setup.model.zero_grad()
    return loss


def second_phase(setup, batch):
    """Leave the encoder's optimizer for later, and its parameters frozen until then."""
    setup.model["encoder"].requires_grad_(setup.step_index >= 20)
    setup.optimizers["head"].zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizers["head"].step()
    return loss


def make_two_ways():
    """Hold all parameters twice, to choose how to train them by a setting."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    return TrainingSetup(
        model,
        {
            "chosen": torch.optim.SGD(model.parameters(), lr=0.05),
            "spare": torch.optim.Adam(model.parameters(), lr=0.05),
        },
    )


def chosen_only(setup, batch):
    setup.optimizers["chosen"].zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizers["chosen"].step()
    return loss


def near_misses():
    def loop(step, make_setup=make_setup):
        return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}

    return {
        "moved by hand": loop(moved_by_hand),
        "moved by hand, in no optimizer": loop(by_hand_alone, make_hand),
        "second phase": loop(second_phase),
        "spare optimizer": loop(chosen_only, make_two_ways),
    }
