"""A part of the model that runs and gets no gradient, and parts that rightly get theirs late or otherwise."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tl_core import TrainingSetup

MESSAGE = """\
[no-gradient] encoder.* (4 tensors) never got a gradient in 6 steps, while 2 other parameters got one; their forward \
pass ran with gradients on
  cause: undecided: the output leaves the graph on the way to the loss (`.detach()`, `.data`, `.item()`, a copy \
through numpy), or does not enter the loss at all
  fix: let the output reach the loss without leaving the graph; if this part is not meant to train, freeze it with \
requires_grad_(False), or pass ignore="""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self, detach=False):
        super().__init__()
        self.detach = detach
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.encoder(x)
        if self.detach:
            hidden = hidden.detach()
        return self.head(hidden)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def loop(make_model, steps=6):
    def make_setup():
        model = make_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": steps}


def buggy():
    return loop(lambda: Net(detach=True))


def healthy():
    return loop(lambda: Net(detach=False))


class Experts(Net):
    """Choose one of four experts by a hard gate; two of them are never chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        hidden = self.encoder(x)
        return self.head(self.experts[int(x[0, 0] > 0)](hidden))


class Depth(Net):
    """Skip the middle block in half of the steps."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.encoder(x)
        if torch.rand(()) < 0.5:
            hidden = hidden + self.block(hidden)
        return self.head(hidden)


class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(4, 4)

    def forward(self, x):
        hidden = checkpoint(self.encoder, self.stem(x), use_reentrant=self.reentrant)
        return self.head(hidden)


class Listed(nn.Module):
    """Keep weights in containers, which are never called."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4, 4) / 4), nn.Parameter(torch.ones(1, 4))])
        self.extra = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1))})

    def forward(self, x):
        for weight in self.weights:
            x = nn.functional.linear(x, weight).tanh()
        return x + self.extra["bias"]


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.attention(x[None], x[None], x[None])[0][0])


class Adapted(nn.Module):
    """Adapt a frozen layer by a low-rank product that starts at 0, so that its first factor's first gradient is 0."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 1).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Momentum(Net):
    """Keep a second encoder that follows the first by hand, and runs without gradients inside of the forward pass."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.teacher.load_state_dict(self.encoder.state_dict())

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x)
        return self.head(self.encoder(x) + 0.1 * target)


def teacher(in_optimizer):
    """Put the teacher's parameters, trainable flag and all, in the optimizer or leave them out."""

    def make_setup():
        model = Momentum()
        parameters = model.parameters() if in_optimizer else [*model.encoder.parameters(), *model.head.parameters()]
        return model, torch.optim.SGD(parameters, lr=0.05)

    return {"make_setup": make_setup, "data": data, "loss_fn": loss_fn, "steps": 6}


def compiled():
    return torch.compile(Net(), backend="aot_eager")


def make_tasks():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def tasks_in_turn(setup, batch):
    """Train one task after the other: the second one's head waits for its turn."""
    setup.optimizer.zero_grad()
    head = setup.model["a" if setup.step_index < 6 else "b"]
    loss = nn.functional.mse_loss(head(setup.model["encoder"](batch[0])), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def by_autograd_grad(setup, batch):
    """Train by ``autograd.grad``, without a backward pass that fills gradients."""
    loss = loss_fn(setup.model, batch)
    parameters = list(setup.model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = grad
    setup.optimizer.step()
    return loss


def inner_loop(setup, batch):
    """Adapt a copy of the weights in an inner loop and differentiate through it."""
    x, y = batch
    setup.optimizer.zero_grad()
    weights = dict(setup.model.named_parameters())
    inner = nn.functional.mse_loss(torch.func.functional_call(setup.model, weights, (x[:4],)), y[:4])
    grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
    loss = nn.functional.mse_loss(torch.func.functional_call(setup.model, adapted, (x[4:],)), y[4:])
    loss.backward()
    setup.optimizer.step()
    return loss


def pruned():
    model = Net()
    prune.l1_unstructured(model.encoder[0], "weight", 0.5)
    return model


def normalised():
    model = Net()
    nn.utils.parametrizations.weight_norm(model.encoder[0])
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))


def unfrozen_late(setup, batch):
    """Thaw the encoder, which the optimizer held from the start, in the fourth step."""
    setup.model.encoder.requires_grad_(setup.step_index >= 3)
    setup.optimizer.zero_grad()
    loss = loss_fn(setup.model, batch)
    loss.backward()
    setup.optimizer.step()
    return loss


def near_misses():
    def trained_by(step):
        case = loop(Net)
        del case["loss_fn"]
        return {**case, "step": step}

    return {
        "experts that are not chosen": loop(Experts),
        "stochastic depth": loop(Depth, steps=12),
        "checkpointed": loop(lambda: Checkpointed(False)),
        "checkpointed, reentrant": loop(lambda: Checkpointed(True)),
        "parameter list": loop(Listed),
        "attention": loop(Attentive),
        "low-rank adapter": loop(Adapted),
        "teacher in the optimizer": teacher(in_optimizer=True),
        "teacher in no optimizer": teacher(in_optimizer=False),
        "compiled": loop(compiled),
        "data parallel": loop(lambda: nn.DataParallel(Net())),
        "tasks in turn": {"make_setup": make_tasks, "data": data, "step": tasks_in_turn, "steps": 12},
        "by autograd.grad": trained_by(by_autograd_grad),
        "inner loop": trained_by(inner_loop),
        "pruned": loop(pruned),
        "normalised": loop(normalised),
        "lazy": loop(lazy),
        "unfrozen late": trained_by(unfrozen_late),
    }
