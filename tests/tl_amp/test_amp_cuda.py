"""The check on a CUDA device, where there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from tl_amp import check_mixed_precision_training
from tl_core import TrainingSetup

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_setup(device, scale=2.0**16, **options):
    model = loops.Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    return TrainingSetup(model, optimizer, scaler=torch.amp.GradScaler("cuda", init_scale=scale))


def fused(device):
    return make_setup(device, fused=True)


def too_high(device):
    return make_setup(device, 2.0**24, fused=True)


def loss_of(setup, batch, dtype=torch.float16):
    with torch.autocast("cuda", dtype=dtype):
        return functional.mse_loss(setup.model(batch[0]), batch[1])


def plain(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.unscale_(setup.optimizer)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


def two_scaled_losses(setup, batch):
    setup.optimizer.zero_grad()
    losses = [loss_of(setup, batch) / 2, loops.penalty_of(setup)]
    torch.autograd.backward(setup.scaler.scale(losses))
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return losses[0].detach()


@pytest.mark.parametrize("build", [make_setup, fused, too_high])
@pytest.mark.parametrize("step", [plain, two_scaled_losses])
def test_correct_loops_pass(build, step):
    """float16 with a GradScaler, plain and fused, also where the scale starts too high."""
    report = check_mixed_precision_training(build, loops.BATCHES, step, device="cuda")
    assert [str(finding) for finding in report.findings] == []


def clipped_too_early(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


def clipped_by_hand_too_early(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    loops.clip_by_hand(setup.model.parameters(), 1.0)
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


def dropped(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss)
    loss.backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


def direct(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.optimizer.step()
    return loss.detach()


def overflowing(setup, batch):
    setup.optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (setup.model(batch[0]) * 1e6).float().pow(2).mean()
    setup.scaler.scale(loss).backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


@pytest.mark.parametrize("build", [make_setup, fused])
@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (clipped_too_early, "clip-before-unscale"),
        (clipped_by_hand_too_early, "clip-before-unscale"),
        (dropped, "loss-not-scaled"),
        (direct, "stepped-past-scaler"),
        (overflowing, "float16-overflow"),
    ],
)
def test_mistakes_are_named_first(build, step, rule):
    """The same mistakes are seen as on the CPU."""
    report = check_mixed_precision_training(build, loops.BATCHES, step, device="cuda")
    assert [finding.rule for finding in report.findings][:1] == [rule]


def test_a_scaler_for_another_device_is_told():
    """A GradScaler("cpu") over CUDA gradients is a note."""

    def build(device):
        setup = make_setup(device)
        setup.scaler = torch.amp.GradScaler("cpu")
        return setup

    report = check_mixed_precision_training(build, loops.BATCHES, plain, device="cuda")
    assert [note.rule for note in report.notes] == ["not-judged"]
