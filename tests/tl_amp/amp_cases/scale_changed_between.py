"""Gradients that are added up under different loss scales."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, penalty_of, scaler_of

from tl_core import TrainingSetup


def _setup(interval):
    """Return a function that builds two optimizers with one scaler, whose scale grows often or not."""

    def make_setup():
        model = Net()
        return TrainingSetup(
            model,
            {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.05) for name in ("body", "head")},
            scaler=scaler_of(256.0, growth_interval=interval),
        )

    return make_setup


def _step(*, shared):
    """Step the head in every call, and accumulate two for the body; update at once, or when nothing is waiting."""

    def step(setup, batch):
        body, head = setup.optimizers.values()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        last = setup.step_index % 2 == 1
        setup.scaler.step(head)
        head.zero_grad()
        if last:
            setup.scaler.step(body)
            body.zero_grad()
        if last or shared:
            setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {"of an optimizer that accumulates": case(_step(shared=True), _setup(1), steps=4)}


def _apart(setup, batch):
    """Step both in every second call."""
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 2).backward()
    if setup.step_index % 2 == 1:
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
        setup.scaler.update()
        setup.model.zero_grad()
    return loss.detach()


def healthy():
    return {"of an optimizer that accumulates": case(_apart, _setup(1), steps=4)}


def near_misses():
    def with_own_gradients(setup, batch):
        """Update after each optimizer, each of which has a backward pass of its own."""
        for optimizer in setup.optimizers.values():
            setup.model.zero_grad()
            loss = loss_of(setup, batch) + penalty_of(setup)
            setup.scaler.scale(loss).backward()
            setup.scaler.step(optimizer)
            setup.scaler.update()
        return loss.detach()

    return {
        "a scale that does not change": case(_step(shared=True), _setup(2000), steps=4),
        "a backward pass for each": case(with_own_gradients, _setup(1), steps=4),
    }


MESSAGES = {
    "of an optimizer that accumulates": """\
Mixed precision training: failed, 1 finding

[scale-changed-between] gradients of 'body' were added up under different loss scales (256 and 512 the first time), \
and divided by one of them (2 updates, steps 1, 3)
  cause: scaler.update() changed the scale between the backward passes of one update: another optimizer that shares \
the scaler was updated in between, or update() runs on every micro-batch
  fix: call scaler.update() only when no optimizer has gradients to apply, or give each optimizer a GradScaler of \
its own

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head  scale
  0     1.472  -               -            0.05     0               2.023           0.1011       0.05     1        \
       512
  1     3.672  2.587           0.1293       0.05     1               3.268           0.1634       0.05     1        \
       1024
  2     5.012  -               -            0.05     0               4.982           0.2491       0.05     1        \
       2048
  3     2.045  3.319           0.166        0.05     1               1.584           0.0792       0.05     1        \
       4096""",
}
