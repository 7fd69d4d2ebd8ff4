"""``step()`` twice for one backward pass, and optimizers that rightly step several times."""

from __future__ import annotations

import copy

import torch
from torch import nn

MESSAGE = """\
[repeated-step] 'optimizer' stepped again with gradients that it had used already: no backward pass ran in between (6 \
of 12 updates, steps 0-5)
  cause: step() is called a second time in the same step, for example by a helper and again by the loop
  fix: call step() once for each backward pass, or once for each accumulation cycle"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(setup, batch):
    return nn.functional.mse_loss(setup.model(batch[0]), batch[1])


def loop(step, make_setup=make_setup):
    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def twins(again):
    def optimize(loss, setup):
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()

    def step(setup, batch):
        loss = loss_of(setup, batch)
        optimize(loss, setup)
        if again:
            setup.optimizer.step()
        return loss

    return loop(step)


def buggy():
    return twins(again=True)


def healthy():
    return twins(again=False)


def several_updates(setup, batch):
    """Update several times on one batch, each time with a gradient of its own."""
    for _ in range(3):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        setup.optimizer.step()
    return loss


def extrapolated(setup, batch):
    """Step ahead, take the gradient there, and step from where it was, as extragradient does."""
    setup.optimizer.zero_grad()
    loss_of(setup, batch).backward()
    before = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    with torch.no_grad():
        torch._foreach_copy_(list(setup.model.parameters()), before)
    setup.optimizer.step()
    return loss


class Lookahead(torch.optim.Optimizer):
    """Step a fast optimizer, and pull it back to slow weights now and then."""

    def __init__(self, fast, every=2):
        super().__init__(fast.param_groups, {})
        self.fast, self.every, self.count = fast, every, 0
        self.slow = [p.detach().clone() for group in fast.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.fast.step()
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                live = [p for group in self.fast.param_groups for p in group["params"]]
                for slow, p in zip(self.slow, live, strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


def make_lookahead():
    model, fast = make_setup()
    return model, Lookahead(fast)


def plain(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    return loss


def make_lbfgs():
    model, _ = make_setup()
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def with_closure(setup, batch):
    def closure():
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        return loss

    return setup.optimizer.step(closure)


def with_closure_for_adam(setup, batch):
    """Hand a closure to an optimizer that calls it once."""

    def closure():
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        return loss

    return setup.optimizer.step(closure)


class Pair:
    """Two optimizers behind one face, of no class of torch's."""

    def __init__(self, *optimizers):
        self.parts = optimizers

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self):
        return {p: entry for part in self.parts for p, entry in part.state.items()}

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def state_dict(self):
        return {str(index): part.state_dict() for index, part in enumerate(self.parts)}


def make_pair():
    model, _ = make_setup()
    return model, Pair(
        torch.optim.SGD(model[0].parameters(), lr=0.05), torch.optim.Adam(model[2].parameters(), lr=0.01)
    )


class Wrapped(torch.optim.Optimizer):
    """Stand for another optimizer without being built as one, as accelerators' wrappers do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def make_wrapped():
    model, optimizer = make_setup()
    return model, Wrapped(optimizer)


def made_in_each_step(setup, batch):
    optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.05)
    loss = loss_of(setup, batch)
    loss.backward()
    optimizer.step()
    setup.model.zero_grad()
    return loss


def copies_outward(setup, batch):
    """Train a copy by an optimizer of its own, and move towards it, as Reptile does."""
    fast = copy.deepcopy(setup.model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.05)
    for _ in range(2):
        inner.zero_grad()
        loss = nn.functional.mse_loss(fast(batch[0]), batch[1])
        loss.backward()
        inner.step()
    for p, target in zip(setup.model.parameters(), fast.parameters(), strict=True):
        p.grad = (p - target).detach()
    setup.optimizer.step()
    return loss


def near_misses():
    return {
        "two behind one face": loop(plain, make_pair),
        "wrapped": loop(plain, make_wrapped),
        "made in each step": loop(made_in_each_step),
        "copies outward": loop(copies_outward),
        "several updates a batch": loop(several_updates),
        "extragradient": loop(extrapolated),
        "lookahead": loop(plain, make_lookahead),
        "closure": loop(with_closure, make_lbfgs),
        "closure that is called once": loop(with_closure_for_adam),
    }
