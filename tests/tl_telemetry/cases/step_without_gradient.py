"""An optimizer that steps for something that no loss uses, and optimizers whose turn has not come."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[step-without-gradient] 'weight' stepped 6 times (steps 0-5), never with a gradient: it holds weight group 0 [0]
  cause: none of the 6 backward passes of the run reached them. Undecided why: the loss does not use them, uses them \
detached, or uses another copy of them
  fix: build the optimizer from what the loss is computed with, or leave it out"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    """Train a weight of the loss, by an optimizer of its own."""
    model = nn.Linear(4, 1)
    weight = nn.Parameter(torch.zeros(()))
    setup = TrainingSetup(
        model,
        {
            "model": torch.optim.SGD(model.parameters(), lr=0.05),
            "weight": torch.optim.SGD([weight], lr=0.05),
        },
    )
    setup.weight = weight
    return setup


def twins(detach):
    def step(setup, batch):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        weight = setup.weight.detach() if detach else setup.weight
        loss = (-weight).exp() * nn.functional.mse_loss(setup.model(batch[0]), batch[1]) + weight
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def buggy():
    return twins(detach=True)


def healthy():
    return twins(detach=False)


def make_tasks():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()})


def tasks(first_b):
    """Draw one task a step and step every optimizer, whether its head ran or not."""

    def step(setup, batch):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        head = setup.model["a" if setup.step_index < first_b else "b"]
        loss = nn.functional.mse_loss(head(setup.model["encoder"](batch[0])), batch[1])
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    return {"make_setup": make_tasks, "data": data, "step": step, "steps": 6}


def make_players():
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()})


def in_turns(setup, batch):
    """Freeze each player while the other trains; at a step's end one of them is always frozen."""
    maker, judge = setup.model["maker"], setup.model["judge"]
    maker.requires_grad_(False)
    judge.requires_grad_(True)
    setup.optimizers["judge"].zero_grad()
    loss = nn.functional.mse_loss(judge(maker(batch[0])), batch[1])
    loss.backward()
    setup.optimizers["judge"].step()
    maker.requires_grad_(True)
    judge.requires_grad_(False)
    setup.optimizers["maker"].zero_grad()
    loss = judge(maker(batch[0])).mean()
    loss.backward()
    setup.optimizers["maker"].step()
    return loss


def make_waiting():
    setup = make_players()
    setup.model["maker"].requires_grad_(False)
    return setup


def waits(setup, batch):
    """Step every optimizer, also that of a part which is frozen until its turn."""
    if setup.step_index == 1000:
        setup.model["maker"].requires_grad_(True)
    setup.model.zero_grad()
    loss = nn.functional.mse_loss(setup.model["judge"](setup.model["maker"](batch[0])), batch[1])
    loss.backward()
    for optimizer in setup.optimizers.values():
        optimizer.step()
    return loss


def near_misses():
    return {
        "in turns": {"make_setup": make_players, "data": data, "step": in_turns, "steps": 6},
        "frozen until its turn": {"make_setup": make_waiting, "data": data, "step": waits, "steps": 6},
        "late task": tasks(first_b=5),
        "task that is not drawn": tasks(first_b=6),
    }
