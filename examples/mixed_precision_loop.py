"""A training loop in float16 whose GradScaler, clip, schedule and average work together.

A small transformer tells the shapes of waves apart, from recordings as a sound card gives them: 16-bit integers. The
forward pass runs in float16, the loss is computed in float32. Two micro-batches make an update: the gradients are
unscaled once, clipped after that, and the schedule and the average of the weights go on only where the scaler has made
the update. Its scale starts too high, as scales do, and comes down where it skips an update.

    python mixed_precision_loop.py --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import TrainingSetup, seed_everything

SHAPES = ("sine", "square", "sawtooth")
LENGTH = 128  # samples of a recording
PATCH = 16  # samples that become one token
MICRO_BATCH_SIZE = 32
ACCUMULATION_STEPS = 2
UPDATES = 40
MAX_NORM = 1.0

Batch = tuple[Tensor, Tensor]  # recordings (N, LENGTH), int16; labels (N,)


class WaveClassifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH // PATCH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(SHAPES))

    def forward(self, waves: Tensor) -> Tensor:
        patches = self.patches(waves.unflatten(1, (-1, PATCH)))
        return self.head(self.body(patches + self.places).mean(dim=1))


def make_setup(device: torch.device | str = "cpu") -> TrainingSetup:
    device = torch.device(device)
    model = WaveClassifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=UPDATES)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**21)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return TrainingSetup(model, optimizer, scheduler, scaler, state={"ema": ema})


def train_step(setup: TrainingSetup, batch: Batch) -> Tensor:
    recordings, labels = batch
    waves = recordings.float() / 32768
    with torch.autocast(waves.device.type, dtype=torch.float16):
        logits = setup.model(waves)
    loss = functional.cross_entropy(logits.float(), labels)
    setup.scaler.scale(loss / ACCUMULATION_STEPS).backward()
    if (setup.step_index + 1) % ACCUMULATION_STEPS == 0:
        setup.scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)
        scale = setup.scaler.get_scale()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        setup.optimizer.zero_grad()
        if setup.scaler.get_scale() >= scale:  # it falls where the update was skipped
            setup.scheduler.step()
            setup.state["ema"].update_parameters(setup.model)
    return loss.detach()


def batch_at(step: int) -> Batch:
    """Return the micro-batch of a step: made-up recordings, of any loudness and pitch, with noise."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(len(SHAPES), (MICRO_BATCH_SIZE,), generator=generator)
    loudness, pitch, start = torch.rand(3, MICRO_BATCH_SIZE, 1, generator=generator)
    turns = start + (2 + 4 * pitch) * torch.arange(LENGTH) / LENGTH
    sine = torch.sin(2 * torch.pi * turns)
    waves = torch.stack([sine, sine.sign(), 2 * (turns % 1) - 1])[labels, torch.arange(MICRO_BATCH_SIZE)]
    noise = 0.05 * torch.randn(MICRO_BATCH_SIZE, LENGTH, generator=generator)
    return (32767 * ((0.5 + 0.5 * loudness) * waves + noise).clamp(-1, 1)).to(torch.int16), labels


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train in float16, with a GradScaler.")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    device = torch.device(parser.parse_args(arguments).device)
    seed_everything(0)
    setup = make_setup(device)
    updates = 0
    while updates < UPDATES:
        total = 0.0
        for _ in range(ACCUMULATION_STEPS):
            recordings, labels = batch_at(setup.step_index)
            total += train_step(setup, (recordings.to(device), labels.to(device))).item()
            setup.step_index += 1
        made = setup.scheduler.last_epoch > updates
        updates += made
        print(
            f"loss {total / ACCUMULATION_STEPS:.3f}, scale {setup.scaler.get_scale():.0f}"
            + ("" if made else ", update skipped")
        )


if __name__ == "__main__":
    main()
