"""How a scaler's device may be written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tl_amp import check_mixed_precision_training

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_a_scaler_of_the_parameters_device_is_judged(device):
    """A device with an index, or a torch.device, is the same device."""

    def make_setup():
        setup = loops.one()()
        setup.scaler = torch.amp.GradScaler(device, init_scale=256.0)
        return setup

    assert str(check_mixed_precision_training(make_setup, loops.BATCHES, loops.plain)) == (
        "Mixed precision training: passed"
    )


def test_a_scaler_of_another_device_is_told():
    """A scaler for another device is a note, whatever its device is written as."""

    def make_setup():
        setup = loops.one()()
        setup.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        setup.scaler._device = torch.device("cuda", 0)  # where there is no such device, torch disables the scaler
        return setup

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loops.loss_of(setup, batch)
        loss.backward()
        return loss.detach()

    notes = check_mixed_precision_training(make_setup, loops.BATCHES, step).notes
    assert [str(note) for note in notes][:1] == [
        "[not-judged] the GradScaler (scaler) is built for 'cuda', and the parameters are on 'cpu': how it is used "
        "there could only be judged in part\n"
        "  fix: write torch.amp.GradScaler('cpu')"
    ]
