import torch
from torch import nn
from torch.nn import functional as F

from tl_core import TrainingSetup

RULE = "discarded-gradient"
MICRO_BATCHES = 4


def make_setup():
    model = nn.Linear(6, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def batch(index):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(index))
    return x, x.sum(1, keepdim=True)


def loop(clear_in_every_micro_batch):
    def step(setup, batch):
        x, y = batch
        if clear_in_every_micro_batch or setup.step_index % MICRO_BATCHES == 0:
            setup.optimizer.zero_grad()
        loss = F.mse_loss(setup.model(x), y)
        (loss / MICRO_BATCHES).backward()
        if (setup.step_index + 1) % MICRO_BATCHES == 0:
            setup.optimizer.step()
        return loss.detach()

    return {"make_setup": make_setup, "data": batch, "step": step}


def buggy():
    return loop(clear_in_every_micro_batch=True)


def healthy():
    return loop(clear_in_every_micro_batch=False)


MESSAGE = """\
[discarded-gradient] the gradients of 15 of 20 backward passes at discarded_gradient.py:27 were cleared before any \
update used them (steps 0-2, 4-6, 8-10, 12-14, 16-18): one in 4 was used
  cause: zero_grad() runs in every micro-batch, while step() runs only at the end of a cycle: nothing accumulates
  fix: call zero_grad() once an update, right after step() (or before the cycle's first backward())"""


def near_misses():
    def skips_bad_batches(setup, batch):
        """A guard drops the gradients of batches with a large loss: now and then, not in every cycle."""
        x, y = batch
        setup.optimizer.zero_grad()
        loss = F.mse_loss(setup.model(x), y)
        loss.backward()
        if setup.step_index % 5 != 2:
            setup.optimizer.step()
        return loss.detach()

    def probes_first(setup, batch):
        """A first backward pass only measures gradients; they are cleared and computed again for the update."""
        x, y = batch
        setup.optimizer.zero_grad()
        F.mse_loss(setup.model(x), y).backward()
        setup.noise = sum(p.grad.square().sum() for p in setup.model.parameters())
        setup.optimizer.zero_grad()
        loss = F.mse_loss(setup.model(x), y)
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    def averages_by_hand(setup, batch):
        """Micro-batch gradients are copied, cleared, and set as their mean once a cycle."""
        x, y = batch
        if setup.step_index % MICRO_BATCHES == 0:
            setup.kept = []
        setup.optimizer.zero_grad()
        loss = F.mse_loss(setup.model(x), y)
        loss.backward()
        setup.kept.append([p.grad.clone() for p in setup.model.parameters()])
        if (setup.step_index + 1) % MICRO_BATCHES == 0:
            for parameter, grads in zip(setup.model.parameters(), zip(*setup.kept, strict=True), strict=True):
                parameter.grad = torch.stack(grads).mean(0)
            setup.optimizer.step()
        return loss.detach()

    return {
        function.__name__: {"make_setup": make_setup, "data": batch, "step": function}
        for function in (skips_bad_batches, probes_first, averages_by_hand)
    }
