"""Parameters that two optimizers step in turns."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[several-optimizers] 'a' and 'b' stepped encoder.* (2 tensors) in turns, each with gradients of its own (4 and 3 \
updates)
  cause: each of these optimizers holds these parameters, and keeps moments and momentum that know nothing of the \
other updates
  fix: nothing, if the turns are meant; else give each parameter to one optimizer"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def twins(shared):
    def make_setup():
        model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
        held = {name: list(model[name].parameters()) for name in "ab"}
        for name in "ab" if shared else "a":
            held[name] += model["encoder"].parameters()
        return TrainingSetup(model, {name: torch.optim.Adam(held[name], lr=0.01) for name in "ab"})

    def step(setup, batch):
        task = "ab"[setup.step_index % 2]
        setup.model.zero_grad()
        loss = nn.functional.mse_loss(setup.model[task](setup.model["encoder"](batch[0])), batch[1])
        loss.backward()
        setup.optimizers[task].step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 7}


def buggy():
    return twins(shared=True)


def healthy():
    return twins(shared=False)
