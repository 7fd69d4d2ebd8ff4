"""The number of updates of a run against the expected one."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import standard_step
from tl_telemetry import num_updates

MESSAGE = """\
[update-count] 'optimizer' stepped 6 times, not 3, in 12 steps
  cause: each update of 'optimizer' took the gradients of 2 backward passes; 3 updates of the 12 passes of this run \
would take 4 each
  fix: compare with tl_telemetry.num_updates(...) for this data set, batch size and accumulation"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def twins(accumulation_steps):
    expected = num_updates(num_examples=96, batch_size=8, accumulation_steps=4)
    return {
        "make_setup": make_setup,
        "data": data,
        "step": standard_step(loss_fn, accumulation_steps=accumulation_steps),
        "steps": 12,
        "judge": lambda run: run.assert_num_updates(expected),
    }


def buggy():
    return twins(accumulation_steps=2)


def healthy():
    return twins(accumulation_steps=4)
