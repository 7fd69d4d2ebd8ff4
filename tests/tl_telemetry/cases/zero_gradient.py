"""Gradients that are 0 in every update, and those that are 0 only at first or in a part."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[zero-gradient] every gradient that 'optimizer' stepped with was exactly 0 (6 of 6 updates, steps 0-5)
  cause: undecided: the loss is flat in these weights (a saturated or constant output, a softmax over one value, a \
clamp at its bound, a term multiplied by 0), two terms of it cancel exactly (a value minus itself, where one of the \
two is meant to be detached), or something sets the gradients to 0 through .data, to name the common ones
  fix: follow the loss back from its end, and look for the operation whose output does not change with its input"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, (x.sum(1) > 0).long()


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def twins(over_classes):
    """Normalise over the one output of each example, which gives 1 whatever the weights are; or compare with labels."""

    def step(setup, batch):
        x, label = batch
        setup.optimizer.zero_grad()
        output = setup.model(x)
        if over_classes:
            loss = -(output.softmax(dim=1).log()[:, 0] * label).mean()
        else:
            loss = nn.functional.binary_cross_entropy_with_logits(output[:, 0], label.float())
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def buggy():
    return twins(over_classes=True)


def healthy():
    return twins(over_classes=False)


class Gated(nn.Module):
    """Open a branch by a gate that starts at 0: the branch's first gradient is exactly 0."""

    def __init__(self):
        super().__init__()
        self.skip = nn.Linear(4, 1)
        self.branch = nn.Linear(4, 1)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.skip(x) + self.gate * self.branch(x)


def make_gated():
    model = Gated()
    branch = torch.optim.SGD(model.branch.parameters(), lr=0.05)
    rest = torch.optim.SGD([*model.skip.parameters(), model.gate], lr=0.05)
    return model, {"branch": branch, "rest": rest}


def loss_fn(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float())


def hinge(model, batch):
    """Meet the margin in some batches, whose loss is then exactly 0."""
    sign = 2.0 * batch[1] - 1
    return (0.2 - sign * batch[0].sum(1) * model(batch[0])[:, 0].exp()).clamp(min=0).mean()


def make_dead():
    """Keep a layer whose units never fire beside one that trains."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def make_players():
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    return model, {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()}


def joins_later(setup, batch):
    """Multiply a second player's terms by 0 until its start, which comes after the run."""
    weight = 0.0 if setup.step_index < 1000 else 1.0
    made = setup.model["maker"](batch[0])
    loss = (made - batch[0]).abs().mean() - weight * setup.model["judge"](made).mean()
    setup.optimizers["maker"].zero_grad()
    loss.backward()
    setup.optimizers["maker"].step()
    judged = weight * (1 - setup.model["judge"](batch[0])).relu().mean()
    setup.optimizers["judge"].zero_grad()
    judged.backward()
    setup.optimizers["judge"].step()
    return loss


def near_misses():
    return {
        "joins later": {"make_setup": make_players, "data": data, "step": joins_later, "steps": 6},
        "gate that starts at 0": {"make_setup": make_gated, "data": data, "loss_fn": loss_fn, "steps": 6},
        "margin met": {"make_setup": make_setup, "data": data, "loss_fn": hinge, "steps": 6},
        "dead layer beside a live one": {"make_setup": make_dead, "data": data, "loss_fn": loss_fn, "steps": 6},
    }
