"""A training script that can be killed at any time and goes on where its last checkpoint was.

    python resume_loop.py --checkpoint last.pt --resume

It saves what a plain loop has: model, optimizer, scheduler and step. Its data need no state of their own, since the
batch of a step follows from the step's number, and nothing in it draws random numbers once the weights are made. A loop
with dropout has to save the generators too, as ``save_training_state`` of tl-resume does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup

NUM_EXAMPLES = 512
BATCH_SIZE = 64
SAVE_EVERY = 5  # steps

Batch = tuple[Tensor, Tensor]  # inputs (N, 6), targets (N, 1)


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
    return TrainingSetup(model, optimizer, scheduler)


def batch_at(step: int) -> Batch:
    """Return the batch of a step: the data are shuffled anew each epoch, by a generator seeded with the epoch."""
    inputs = torch.randn(NUM_EXAMPLES, 6, generator=torch.Generator().manual_seed(0))
    epoch, index = divmod(step, NUM_EXAMPLES // BATCH_SIZE)
    order = torch.randperm(NUM_EXAMPLES, generator=torch.Generator().manual_seed(epoch))
    chosen = inputs[order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]]
    return chosen, chosen[:, :3].sin().sum(dim=1, keepdim=True)


def train_step(setup: TrainingSetup, batch: Batch) -> Tensor:
    inputs, targets = batch
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(setup.model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.optimizer.step()
    setup.scheduler.step()
    return loss.detach()


def save(setup: TrainingSetup, path: Path) -> None:
    """Write a checkpoint so that the old one or the new one is there, whole, whenever the process or the power dies."""
    checkpoint = {
        "model": setup.model.state_dict(),
        "optimizer": setup.optimizer.state_dict(),
        "scheduler": setup.scheduler.state_dict(),
        "step": setup.step_index,
    }
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(setup: TrainingSetup, path: Path) -> int:
    """Restore a checkpoint and return the step to go on from."""
    checkpoint = torch.load(path, weights_only=True)
    setup.model.load_state_dict(checkpoint["model"])
    setup.optimizer.load_state_dict(checkpoint["optimizer"])
    setup.scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["step"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train, and save every few steps.")
    parser.add_argument("--checkpoint", type=Path, default=Path("last.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    setup = make_setup()
    if options.resume and options.checkpoint.exists():
        setup.step_index = load(setup, options.checkpoint)
        print(f"resumed at step {setup.step_index}")
    while setup.step_index < options.steps:
        loss = train_step(setup, batch_at(setup.step_index))
        setup.step_index += 1  # before saving: the checkpoint holds the number of steps that are done
        if setup.step_index % SAVE_EVERY == 0:
            save(setup, options.checkpoint)
            print(f"{setup.step_index} steps, loss {loss.item():.4f}, saved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
