"""A tight clip of gradients that are still multiplied by the loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tl_core import TrainingSetup
from tl_telemetry import run_training


def make_setup():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return TrainingSetup(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def batch_of(step):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(1, keepdim=True)


def step_with(unscale):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = functional.mse_loss(setup.model(batch[0]), batch[1])
        setup.scaler.scale(loss).backward()
        if unscale:
            setup.scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), 0.5)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


@pytest.mark.parametrize("unscale", [False, True])
def test_the_note_says_that_the_gradients_are_scaled(unscale):
    """Before unscale_(), the scale is the cause; after it, the bound may be meant."""
    run = run_training(make_setup, batch_of, step_with(unscale), steps=6)
    note = next(note for note in run.notes if note.rule == "clip-every-update")
    assert ("gradients still multiplied by the loss scale" in note.seen) is not unscale
    assert note.cause.startswith("undecided: the bound is meant to be tight") is unscale
    assert note.fix.startswith("nothing, if a tight bound is meant") is unscale
    if not unscale:
        assert (
            note.cause
            == "the clip runs before scaler.unscale_(optimizer), on gradients that the loss scale makes larger"
        )
        assert note.fix == (
            "call scaler.unscale_(optimizer) before it, once an update; tl-amp's check looks at all that is done "
            "with a GradScaler"
        )
