"""A loss that goes backward twice into one update, and graphs that are rightly used twice."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[backward-twice] backward() ran twice on the same loss before 'optimizer' stepped (backward_twice.py:39 and \
backward_twice.py:46; 6 of 6 updates, steps 0-5): the gradients of all 4 parameters held it twice
  cause: the second call adds its gradients to those of the first: nothing cleared them in between
  fix: call backward() once on each loss; to log gradient norms, read p.grad after that call, or take them from \
torch.autograd.grad, which adds nothing to p.grad"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(setup, batch):
    return nn.functional.mse_loss(setup.model(batch[0]), batch[1])


def loop(step, make_setup=make_setup):
    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def twins(twice):
    def log_gradient_norm(loss, model):
        if twice:
            loss.backward(retain_graph=True)
        return sum(p.grad.norm() for p in model.parameters() if p.grad is not None)

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        log_gradient_norm(loss, setup.model)
        loss.backward()
        setup.optimizer.step()
        return loss

    return loop(step)


def buggy():
    return twins(twice=True)


def healthy():
    return twins(twice=False)


def two_losses(setup, batch):
    """Send two losses over one graph, and their sum's parts apart."""
    setup.optimizer.zero_grad()
    output = setup.model(batch[0])
    loss, penalty = nn.functional.mse_loss(output, batch[1]), output.square().mean()
    loss.backward(retain_graph=True)
    (0.1 * penalty).backward()
    setup.optimizer.step()
    return loss


def by_parts(setup, batch):
    """Compute the gradients of the layers one after the other."""
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward(inputs=list(setup.model[0].parameters()), retain_graph=True)
    loss.backward(inputs=list(setup.model[2].parameters()))
    setup.optimizer.step()
    return loss


def logged_and_cleared(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward(retain_graph=True)
    setup.optimizer.zero_grad(set_to_none=False)
    loss.backward()
    setup.optimizer.step()
    return loss


def logged_by_grad(setup, batch):
    """Read the gradient norm off ``autograd.grad``, which accumulates nothing."""
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    torch.autograd.grad(loss, list(setup.model.parameters()), retain_graph=True)
    loss.backward()
    setup.optimizer.step()
    return loss


def gradient_penalty(setup, batch):
    """Differentiate through the gradient."""
    setup.optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    output = setup.model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = nn.functional.mse_loss(output, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def make_minimax():
    model = nn.ModuleDict({"player": nn.Linear(4, 4), "adversary": nn.Linear(4, 1)})
    return TrainingSetup(
        model,
        {
            "player": torch.optim.SGD(model["player"].parameters(), lr=0.01),
            "adversary": torch.optim.SGD(model["adversary"].parameters(), lr=0.01),
        },
    )


def minimax(setup, batch):
    """Give one loss to the player and its negative to the adversary, each with its own gradients only."""
    player, adversary = setup.optimizers["player"], setup.optimizers["adversary"]
    loss = setup.model["adversary"](setup.model["player"](batch[0])).tanh().mean()
    player.zero_grad()
    loss.backward(retain_graph=True)
    adversary.zero_grad()
    (-1.0 * loss).backward(inputs=list(setup.model["adversary"].parameters()))
    player.step()
    adversary.step()
    return loss


def recurrent(setup, batch):
    """Accumulate the losses of a sequence, one backward pass each, over one growing graph."""
    setup.optimizer.zero_grad()
    hidden = batch[0]
    for _ in range(3):
        hidden = hidden + 0.1 * setup.model(hidden)
        loss = hidden.square().mean()
        loss.backward(retain_graph=True)
    setup.optimizer.step()
    return loss


class Reversed(torch.autograd.Function):
    """Turn the gradient around on its way back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def reversed_gradient(setup, batch):
    """Train the adversary and the player by one loss, whose gradient turns around between them."""
    setup.model.zero_grad()
    loss = setup.model["adversary"](Reversed.apply(setup.model["player"](batch[0]))).tanh().mean()
    loss.backward()
    for optimizer in setup.optimizers.values():
        optimizer.step()
    return loss


def near_misses():
    return {
        "reversed gradient": loop(reversed_gradient, make_minimax),
        "two losses": loop(two_losses),
        "by parts": loop(by_parts),
        "logged and cleared": loop(logged_and_cleared),
        "logged by autograd.grad": loop(logged_by_grad),
        "gradient penalty": loop(gradient_penalty),
        "minimax": loop(minimax, make_minimax),
        "sequence": loop(recurrent),
    }
