"""Setups and steps of mixed precision loops, shared by the tests of this folder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import TrainingSetup

_generator = torch.Generator().manual_seed(3)
_weights = torch.randn(6, 1, generator=_generator)
BATCHES = [(x, x @ _weights) for x in torch.randn(6, 12, 6, generator=_generator)]


class Net(nn.Module):
    """Two parts, so that two optimizers can share the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 10), nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def scaler_of(scale=256.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def one(kind=torch.optim.SGD, scale=256.0, schedule=None, average=None, lr=0.05, **options):
    """Return a function that builds a setup with one optimizer; ``scale=None`` leaves the scaler out."""

    def make_setup():
        model = Net()
        optimizer = kind(model.parameters(), lr=lr, **options)
        return TrainingSetup(
            model,
            optimizer,
            None if schedule is None else schedule(optimizer),
            None if scale is None else scaler_of(scale),
            {} if average is None else {"average": average(model)},
        )

    return make_setup


def two(kind=torch.optim.SGD, scale=256.0):
    """Return a function that builds a setup with an optimizer for each part, named after it."""

    def make_setup():
        model = Net()
        optimizers = {name: kind(getattr(model, name).parameters(), lr=0.05) for name in ("body", "head")}
        return TrainingSetup(model, optimizers, scaler=scaler_of(scale))

    return make_setup


def loss_of(setup, batch, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype=dtype):
        outputs = setup.model(batch[0])
    return functional.mse_loss(outputs.float(), batch[1])


def plain(setup, batch, dtype=torch.bfloat16):
    """Train as torch's documentation does."""
    setup.model.zero_grad()
    loss = loss_of(setup, batch, dtype)
    setup.scaler.scale(loss).backward()
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
    setup.scaler.update()
    return loss.detach()


def penalty_of(setup):
    return 1e-3 * setup.model.body.weight.pow(2).sum()


def clip_by_hand(parameters, bound):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(torch.clamp(bound / (norm + 1e-6), max=1.0))


def case(step, make_setup=None, **options):
    """Return the arguments of a check: few steps, so that messages stay short."""
    return {"make_setup": make_setup or one(), "data": BATCHES, "step": step, "steps": 4} | options


def update(setup):
    """Step every optimizer through the scaler, and update its scale."""
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
    setup.scaler.update()


def decaying(optimizer):
    return LambdaLR(optimizer, lambda count: 1.0 / (1.0 + 0.1 * count))


def averaging(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def moving(guard, start):
    """Train in float16, and move schedulers and averages where a guard allows it: from the scale now, and before."""

    def step(setup, batch):
        before = setup.scaler.get_scale() if setup.step_index else start
        loss = plain(setup, batch, torch.float16)
        if guard(setup.scaler.get_scale(), before):
            for scheduler in setup.schedulers.values():
                scheduler.step()
            for average in setup.state.values():
                average.update_parameters(setup.model)
        return loss

    return step


def always(now, before):
    return True


def applied(now, before):
    return now >= before
